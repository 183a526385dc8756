#!/usr/bin/env bash
# The C++ tests on this machine, on every instruction set that it has.
#
#   scripts/core_test.sh [BUILD_FOLDER [CMAKE_OPTION...]]      e.g. ... build/clang -DCMAKE_CXX_COMPILER=clang++
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none
build=${1:-$root/build/native}
[ $# -eq 0 ] || shift

cmake -S "$root" -B "$build" -DTILEWISE_PYTHON=OFF -DTILEWISE_TESTS=ON -DTILEWISE_WERROR="${TILEWISE_WERROR:-ON}" "$@" >/dev/null
cmake --build "$build" --target core_test --parallel "$(nproc)"
# One process a core, each with a share of the tests; TILEWISE_EVERY=4 runs one case in four.
processes=() failed=0 count=$(nproc)
for ((i = 0; i < count; i++)); do
  "$build/core_test" --share "$i" "$count" --every "${TILEWISE_EVERY:-1}" &
  processes+=($!)
done
for each in "${processes[@]}"; do wait "$each" || failed=1; done
exit $failed
