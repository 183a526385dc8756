#!/usr/bin/env bash
# The tests: the ordinary suite, and those of the GPU kernels in Triton's interpreter, where Triton is installed.
#
#   scripts/test.sh PYTHON [PYTEST_ARGUMENT...]
#
# Triton decides when it is imported whether it interprets. So the interpreted tests have a process of their own, with the
# same arguments; there tests/conftest.py looks at tests/kernels/gpu only. Both work on one core most of the time, so they
# run at once, and what the second says is shown when the first has ended. An exit code of 5 means that the arguments chose
# no test of that process.
set -uo pipefail
# A thread that waits sleeps: beside other work one that spins costs the test minutes.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

python=$1
shift

second=
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'; then
  said=$(mktemp)
  TRITON_INTERPRET=1 "$python" -m pytest "$@" >"$said" 2>&1 </dev/null &
  second=$!
  trap 'kill "$second" 2>/dev/null; rm -f "$said"' EXIT
fi

env -u TRITON_INTERPRET "$python" -m pytest "$@"
ordinary=$?
if [ -z "$second" ] || { [ $ordinary != 0 ] && [ $ordinary != 1 ] && [ $ordinary != 5 ]; }; then exit $ordinary; fi

printf '\nThe GPU kernels in the interpreter of Triton:\n'
wait "$second"
interpreted=$?
cat "$said"
if [ $interpreted = 5 ]; then exit $ordinary; fi
if [ $ordinary = 5 ]; then exit $interpreted; fi
exit $((ordinary > interpreted ? ordinary : interpreted))
