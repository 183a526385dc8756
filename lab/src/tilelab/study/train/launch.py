"""The processes of one run: ``python -m tilelab.study.train.launch CHILD``.

It stands where a run of one process has its child (``child.py``). It reads the same job from
standard input, ends at once when that closes, and has the same exit status. In between it starts
the job's processes as ``torchrun --standalone`` does, with torch's own agent: that one names them,
watches them, and ends all when one fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import uuid

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tilelab.study.train.child import EXPECTED_ERROR, JOB, end_with_parent

_MONITOR_S = 0.1


def main(module: str) -> int:
    """Do the job on standard input in processes of a module; return the exit status."""
    line = sys.stdin.readline()
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ[JOB] = line  # standard input is for all of them to see that it closes
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=json.loads(line)["execution"]["processes"],
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module)
    except ChildFailedError as error:
        return _reported(error)
    return 0


def _reported(error: ChildFailedError) -> int:
    """Say which process failed first and why; the exit status is its own."""
    rank, failure = min(error.failures.items(), key=lambda each: _order(each[1]))
    if failure.exitcode == EXPECTED_ERROR:
        print(failure.message, file=sys.stderr)
        return EXPECTED_ERROR
    if failure.exitcode < 0:
        print(f"process {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        # To end the same way: whoever started this one tells a signal from an error.
        if failure.exitcode != -signal.SIGKILL:
            signal.signal(-failure.exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -failure.exitcode)
    print(f"process {rank} ended with status {failure.exitcode}", file=sys.stderr)
    print(failure.message, file=sys.stderr)
    return failure.exitcode


def _order(failure: ProcessFailure) -> tuple[int, int]:
    """Return a sort key with the cause first: when a process dies, others fail waiting for it.

    A signal came from outside, but for the one by which the agent ends the rest.
    """
    code = failure.exitcode
    if code == -signal.SIGTERM:
        rank = 3
    elif code < 0:
        rank = 0
    else:
        rank = 1 if code == EXPECTED_ERROR else 2
    return rank, failure.timestamp


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
