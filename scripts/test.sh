#!/usr/bin/env bash
# The tests: the ordinary suite, and those of the GPU kernels in Triton's interpreter, where Triton is installed.
#
#   scripts/test.sh PYTHON [--all | --part K/N] [PYTEST_ARGUMENT...]
#
# Without --all the thorough tests are left out (tests/tiers.py); with --part all but one part of them. A -m among the arguments overrides that choice.
# Triton decides when it is imported whether it interprets. So the interpreted tests have a process of their own, with the
# same arguments; there tests/conftest.py looks at tests/kernels/gpu only. An exit code of 5 means that the arguments chose
# no test.
# Without further arguments there is a process per core (pytest-xdist), each with whole files. The interpreted tests run at
# the same time then, so that no core idles while the longest file of one suite ends; their output follows.
set -uo pipefail
# A thread that waits sleeps: beside other work one that spins costs the test minutes.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# Every process would compile the packages and the tests anew: half of the time in which a process finds its tests.
unset PYTHONDONTWRITEBYTECODE

python=$1
shift
unset TILEWISE_PART # of a run that this one is a test of
tier="not slow and not thorough"
case ${1:-} in
  --all) tier="not slow"; shift ;;
  --part)
    tier="not slow"
    export TILEWISE_PART=${2:?--part takes such as 2/3}
    shift 2
    ;;
esac
whole=
if [ $# = 0 ]; then
  whole=1
  set -- -q -n "$("$python" -c 'import os; print(min(8, os.cpu_count() or 1))')" --dist loadfile
fi

ordinary() { env -u TRITON_INTERPRET "$python" -m pytest -m "$tier" "$@"; }
interpreted() { TRITON_INTERPRET=1 "$python" -m pytest -m "$tier" "$@"; }
if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'; then
  ordinary "$@"
  exit
fi

if [ $whole ]; then
  output=$(mktemp)
  interpreted "$@" >"$output" 2>&1 &
  other=$!
  trap 'kill -INT $other 2>/dev/null; rm -f "$output"' EXIT
fi
ordinary "$@"
first=$?
if [ $first != 0 ] && [ $first != 1 ] && [ $first != 5 ]; then exit $first; fi
printf '\nThe GPU kernels in the interpreter of Triton:\n'
if [ $whole ]; then
  wait $other
  second=$?
  cat "$output"
else
  interpreted "$@"
  second=$?
fi
if [ $second = 5 ]; then exit $first; fi
if [ $first = 5 ]; then exit $second; fi
exit $((first > second ? first : second))
