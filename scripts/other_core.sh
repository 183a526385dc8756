#!/usr/bin/env bash
# Python tests with a core that is built in another way (Linux, GCC; call ./run setup first).
#
#   scripts/other_core.sh sanitize [pytest arguments]   AddressSanitizer and UndefinedBehaviorSanitizer
#   scripts/other_core.sh tiles [pytest arguments]      matrix tiles (AMX) in software, on a processor with AVX512_BF16 and
#                                                       AVX512_VBMI: the same bits, some 10 times as slow
#   scripts/other_core.sh sanitize --module tests.fuzz [arguments]    another module (./run fuzz --sanitize)
#
# Without arguments the tests of the kernels. The package goes into a virtual environment of its own, which borrows the
# other packages of .venv by path: the editable install in .venv always comes first there, so a PYTHONPATH would not do.
# Of the C++ tests the same: scripts/core_test.sh build/tiles/core_test -DTILEWISE_SOFTWARE_TILES=ON
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
kind=${1:-}
case $kind in
  sanitize) option=TILEWISE_SANITIZE ;;
  tiles) option=TILEWISE_SOFTWARE_TILES ;;
  *) echo "other_core: say which core: sanitize or tiles" >&2; exit 2 ;;
esac
shift
own=$root/build/$kind/venv
compiler=${CXX:-g++}

[ -x "$python" ] || { echo "other_core: no .venv: call ./run setup first" >&2; exit 1; }
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

[ -x "$own/bin/python" ] || "$python" -m venv --without-pip "$own"
printf '%s\n' "$(site "$python")" "$root/lab/src" >"$(site "$own/bin/python")/borrowed.pth"
CXX=$compiler "$python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --upgrade \
  --target "$(site "$own/bin/python")" --config-settings=build-dir="$root/build/$kind/core" \
  --config-settings=cmake.define.$option=ON --config-settings=install.strip=false "$root"

cd "$root"
if [ "$kind" = sanitize ]; then
  runtime() { "$compiler" -print-file-name="$1"; }
  # Python and torch keep memory on purpose, so leaks say nothing about the core.
  # The allocations of new and delete cross from instrumented into other libraries, so their kinds need not match.
  export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
  export LD_PRELOAD="$(runtime libasan.so) $(runtime libubsan.so) $(runtime libstdc++.so)"
fi
if [ "${1:-}" = --module ]; then exec "$own/bin/python" -m "${@:2}"; fi
if [ $# -eq 0 ]; then set -- tests/kernels -k "not tiled"; fi # the tiled reference is not ours in C++
# With pytest's usual capture the sanitizer's report, written as the process dies, would be lost.
exec "$own/bin/python" -m pytest --capture=sys "$@"
