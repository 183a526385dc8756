#!/usr/bin/env bash
# The C++ tests on this machine, on every instruction set that it has.
#
#   scripts/core_test.sh [BUILD_FOLDER [CMAKE_OPTION...]]      e.g. ... build/clang -DCMAKE_CXX_COMPILER=clang++
#
# A folder that is built already keeps its options: with build/cp3* the tests use the objects of the installed core.
# TILEWISE_TARGET=counted builds that instead, and runs nothing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none
build=${1:-$root/build/native} target=${TILEWISE_TARGET:-core_test}
[ $# -eq 0 ] || shift

options=(-DTILEWISE_TESTS=ON) cmake=cmake
if [ -f "$build/CMakeCache.txt" ]; then # by the same cmake: another one builds everything again
  cmake=$(sed -n 's/^CMAKE_COMMAND:INTERNAL=//p' "$build/CMakeCache.txt")
  [ -x "$cmake" ] || cmake=cmake
else
  options+=(-DTILEWISE_PYTHON=OFF -DTILEWISE_WERROR="${TILEWISE_WERROR:-ON}")
fi
"$cmake" -S "$root" -B "$build" "${options[@]}" "$@" >/dev/null
"$cmake" --build "$build" --target "$target" --parallel "$(nproc)"
[ "$target" = core_test ] || exit 0
# One process a core, each with a share of the tests; TILEWISE_EVERY=4 runs one case in four.
processes=() failed=0 count=$(nproc)
for ((i = 0; i < count; i++)); do
  "$build/core_test" --share "$i" "$count" --every "${TILEWISE_EVERY:-1}" &
  processes+=($!)
done
for each in "${processes[@]}"; do wait "$each" || failed=1; done
exit $failed
