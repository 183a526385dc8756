#!/usr/bin/env bash
# The tests: the ordinary suite, then those of the GPU kernels in Triton's interpreter, where Triton is installed.
#
#   scripts/test.sh PYTHON [--all] [PYTEST_ARGUMENT...]
#
# Without --all the thorough tests are left out (tests/tiers.py). A -m among the arguments overrides that choice.
# Triton decides when it is imported whether it interprets. So the interpreted tests have a process of their own, with the
# same arguments; there tests/conftest.py looks at tests/kernels/gpu only. Without further arguments there is a process per
# core (pytest-xdist), each with whole files. An exit code of 5 means that the arguments chose no test.
set -uo pipefail
# A thread that waits sleeps: beside other work one that spins costs the test minutes.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

python=$1
shift
tier="not slow and not thorough"
if [ "${1:-}" = --all ]; then tier="not slow"; shift; fi
if [ $# = 0 ]; then
  set -- -q -n "$("$python" -c 'import os; print(min(8, os.cpu_count() or 1))')" --dist loadfile
fi

env -u TRITON_INTERPRET "$python" -m pytest -m "$tier" "$@"
ordinary=$?
if [ $ordinary != 0 ] && [ $ordinary != 1 ] && [ $ordinary != 5 ]; then exit $ordinary; fi
if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'; then exit $ordinary; fi

printf '\nThe GPU kernels in the interpreter of Triton:\n'
TRITON_INTERPRET=1 "$python" -m pytest -m "$tier" "$@"
interpreted=$?
if [ $interpreted = 5 ]; then exit $ordinary; fi
if [ $ordinary = 5 ]; then exit $interpreted; fi
exit $((ordinary > interpreted ? ordinary : interpreted))
