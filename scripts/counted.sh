#!/usr/bin/env bash
# The account of bytes held against what cachegrind counts; skipped where valgrind is missing.
#
#   scripts/counted.sh [--quick] [--json FILE]      quick: what continuous integration runs
#
# PYTHON names the Python to use, BUILD the folder to build in.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
build=${BUILD:-$root/build/native}
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none

if ! command -v valgrind >/dev/null; then
  echo "skipped: valgrind is not installed (Debian, Ubuntu: apt install valgrind)"
  exit 0
fi
options=(-DTILEWISE_TESTS=ON) cmake=cmake
if [ -f "$build/CMakeCache.txt" ]; then # by the same cmake: another one builds everything again
  cmake=$(sed -n 's/^CMAKE_COMMAND:INTERNAL=//p' "$build/CMakeCache.txt")
  [ -x "$cmake" ] || cmake=cmake
else
  options+=(-DTILEWISE_PYTHON=OFF -DTILEWISE_WERROR="${TILEWISE_WERROR:-ON}")
fi
"$cmake" -S "$root" -B "$build" "${options[@]}" >/dev/null
"$cmake" --build "$build" --target counted --parallel "$(nproc)"
PYTHONPATH=$root/src:$root/lab/src "$python" -m tilelab.counted --driver "$build/counted" "$@"
