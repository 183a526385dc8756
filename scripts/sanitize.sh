#!/usr/bin/env bash
# The numeric tests against a core with AddressSanitizer and UndefinedBehaviorSanitizer (Linux, GCC; call ./run setup first).
#
#   scripts/sanitize.sh [pytest arguments]                default: tests/kernels on the core
#   scripts/sanitize.sh --module tests.fuzz [arguments]   another module (./run fuzz --sanitize)
#
# The package with the instrumented core goes into a virtual environment of its own, which borrows the other packages of
# .venv by path: the editable install in .venv always comes first there, so a PYTHONPATH alone would not do.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
own=$root/build/sanitize/venv
compiler=${CXX:-g++}

[ -x "$python" ] || { echo "sanitize: no .venv: call ./run setup first" >&2; exit 1; }
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

[ -x "$own/bin/python" ] || "$python" -m venv --without-pip "$own"
printf '%s\n' "$(site "$python")" "$root/lab/src" >"$(site "$own/bin/python")/borrowed.pth"
CXX=$compiler "$python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --upgrade \
  --target "$(site "$own/bin/python")" --config-settings=build-dir="$root/build/sanitize/core" \
  --config-settings=cmake.define.TILEWISE_SANITIZE=ON --config-settings=install.strip=false "$root"

runtime() { "$compiler" -print-file-name="$1"; }
cd "$root"
# Python and torch keep memory on purpose, so leaks say nothing about the core.
# The allocations of new and delete cross from instrumented into other libraries, so their kinds need not match.
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
export LD_PRELOAD="$(runtime libasan.so) $(runtime libubsan.so) $(runtime libstdc++.so)"
if [ "${1:-}" = --module ]; then exec "$own/bin/python" -m "${@:2}"; fi
if [ $# -eq 0 ]; then set -- tests/kernels -k "not tiled"; fi # the tiled reference is not ours in C++
# With pytest's usual capture the sanitizer's report, written as the process dies, would be lost.
exec "$own/bin/python" -m pytest --capture=sys "$@"
