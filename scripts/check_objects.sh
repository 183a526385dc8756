#!/usr/bin/env bash
# Does code of a higher instruction set leak out of its object file?
#
#   scripts/check_objects.sh [BUILD_FOLDER]     after scripts/core_test.sh
#
# A function that several files define (inline, template) is kept once by the linker, from whichever file comes first. If
# that copy was compiled for AVX-512, it runs on processors without it, and the process dies. So a file csrc/isa_*.cc may
# share no weak symbol with any other object file.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
objects=${1:-$root/build/native}/CMakeFiles/tilewise_kernels.dir/csrc
shared=$(
  for object in "$objects"/*.o; do
    nm --defined-only "$object" | awk -v file="$(basename "$object")" '$2 == "W" { print $3, file }'
  done | awk '{ count[$1]++; isa[$1] = isa[$1] || $2 ~ /^isa_/; files[$1] = files[$1] " " $2 }
    END { for (name in count) if (count[name] > 1 && isa[name]) print name ":" files[name] }' | c++filt | sort
)
if [ -n "$shared" ]; then
  printf 'check_objects: shared between instruction sets:\n%s\n' "$shared" >&2
  exit 1
fi
echo "check_objects: nothing leaks out of an instruction set's object file"
