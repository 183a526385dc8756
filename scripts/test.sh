#!/usr/bin/env bash
# The tests: the ordinary suite, then those of the GPU kernels in Triton's interpreter, where Triton is installed.
#
#   scripts/test.sh PYTHON [PYTEST_ARGUMENT...]
#
# Triton decides when it is imported whether it interprets. So the interpreted tests have a process of their own, with the
# same arguments; there tests/conftest.py looks at tests/kernels/gpu only. An exit code of 5 means that the arguments chose
# no test of that process.
set -uo pipefail
# A thread that waits sleeps: beside other work one that spins costs the test minutes.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

python=$1
shift

env -u TRITON_INTERPRET "$python" -m pytest "$@"
ordinary=$?
if [ $ordinary != 0 ] && [ $ordinary != 1 ] && [ $ordinary != 5 ]; then exit $ordinary; fi
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' || exit $ordinary

printf '\nThe GPU kernels in the interpreter of Triton:\n'
TRITON_INTERPRET=1 "$python" -m pytest "$@"
interpreted=$?
if [ $interpreted = 5 ]; then exit $ordinary; fi
if [ $ordinary = 5 ]; then exit $interpreted; fi
exit $((ordinary > interpreted ? ordinary : interpreted))
