#!/usr/bin/env bash
# The C++ tests for aarch64: cross-compiled (static, only the portable instruction set) and run under qemu.
#
#   scripts/cross_test.sh            needs aarch64-linux-gnu-g++ and qemu-aarch64
#                                    (Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none
build=$root/build/aarch64
compiler=${AARCH64_CXX:-aarch64-linux-gnu-g++}
emulator=${AARCH64_RUN:-qemu-aarch64}

for tool in "$compiler" "$emulator" cmake; do
  command -v "$tool" >/dev/null || { echo "cross_test: $tool is not installed (see the head of this script)" >&2; exit 1; }
done

cmake -S "$root" -B "$build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
  -DTILEWISE_PYTHON=OFF -DTILEWISE_TESTS=ON -DTILEWISE_WERROR="${TILEWISE_WERROR:-ON}" -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null
cmake --build "$build" --target core_test --parallel "$(nproc)"
# One process a core, each with a share of the tests; TILEWISE_EVERY=4 runs one case in four.
processes=() failed=0 count=$(nproc)
for ((i = 0; i < count; i++)); do
  "$emulator" "$build/core_test" --share "$i" "$count" --every "${TILEWISE_EVERY:-1}" &
  processes+=($!)
done
for each in "${processes[@]}"; do wait "$each" || failed=1; done
exit $failed
