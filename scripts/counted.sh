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

if ! command -v valgrind >/dev/null; then
  echo "skipped: valgrind is not installed (Debian, Ubuntu: apt install valgrind)"
  exit 0
fi
TILEWISE_TARGET=counted "$root/scripts/core_test.sh" "$build"
PYTHONPATH=$root/src:$root/lab/src "$python" -m tilelab.counted --driver "$build/counted" "$@"
