#!/usr/bin/env bash
# The C++ tests for aarch64: cross-compiled (static), and run under qemu on a processor with bfloat16 dot products and on one
# without.
#
#   scripts/cross_test.sh            needs aarch64-linux-gnu-g++ and qemu-aarch64
#                                    (Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user)
#   scripts/cross_test.sh --build TARGET     builds and runs nothing
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none
build=$root/build/aarch64
compiler=${AARCH64_CXX:-aarch64-linux-gnu-g++}
emulator=${AARCH64_RUN:-qemu-aarch64}
target=core_test
[ "${1:-}" != --build ] || target=$2

for tool in "$compiler" "$emulator" cmake; do
  command -v "$tool" >/dev/null || { echo "cross_test: $tool is not installed (see the head of this script)" >&2; exit 1; }
done

cmake -S "$root" -B "$build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
  -DTILEWISE_PYTHON=OFF -DTILEWISE_TESTS=ON -DTILEWISE_WERROR="${TILEWISE_WERROR:-ON}" -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null
cmake --build "$build" --target "$target" --parallel "$(nproc)"
[ "${1:-}" != --build ] || exit 0
"$root/scripts/check_objects.sh" "$build"
# One process a core, each with a share of the tests; TILEWISE_EVERY=4 runs one case in four. What both processors have,
# the second one runs in part.
failed=0 count=$(nproc) every=${TILEWISE_EVERY:-1}
for cpu in max cortex-a72; do
  processes=()
  for ((i = 0; i < count; i++)); do
    "$emulator" -cpu "$cpu" "$build/core_test" --share "$i" "$count" --every "$every" &
    processes+=($!)
  done
  for each in "${processes[@]}"; do wait "$each" || failed=1; done
  every=$((every * 4))
done
exit $failed
