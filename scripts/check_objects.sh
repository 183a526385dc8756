#!/usr/bin/env bash
# Does code of a higher instruction set leak out of its object file?
#
#   scripts/check_objects.sh [BUILD_FOLDER]     after scripts/core_test.sh
#
# A function that several files define (inline, template) is kept once by the linker, from whichever file comes first. If
# that copy was compiled for AVX-512, it runs on processors without it, and the process dies. So files
# csrc/isa/NAME.cc and decode_NAME.cc may share no weak symbol with those of another instruction set, or of none.
# Where there is a passes_NAME.cc, decode_NAME.cc and pieces_NAME.cc belong to it, and NAME.cc runs on any processor.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
objects=${1:-$root/build/native}/CMakeFiles/tilewise_kernels.dir/csrc
shared=$(
  for object in "$objects"/*/*.o; do
    file=${object#"$objects"/}
    passes=${file/#isa\/decode_/isa/passes_}
    passes=${passes/#isa\/pieces_/isa/passes_}
    if [ -e "$objects/$passes" ]; then
      file=$passes
    fi
    nm --defined-only "$object" | awk -v file="${file/#isa\/decode_/isa/}" '$2 == "W" { print $3, file }'
  done | sort -u | awk '{ count[$1]++; isa[$1] = isa[$1] || ($2 ~ /^isa\// && $2 !~ /dispatch/); files[$1] = files[$1] " " $2 }
    END { for (name in count) if (count[name] > 1 && isa[name]) print name ":" files[name] }' | c++filt | sort
)
if [ -n "$shared" ]; then
  printf 'check_objects: shared between instruction sets:\n%s\n' "$shared" >&2
  exit 1
fi
echo "check_objects: nothing leaks out of an instruction set's object file"
