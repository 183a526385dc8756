"""The parent's end of a child process, which it asks for scaling and for memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tilewise
from tilelab.bench.result import Memory, Scaling
from tilewise.errors import TilewiseError

__all__ = ["ask", "environment", "memory", "scaling"]

_DTYPES = ("float32", "bfloat16")  # of the memory measurement


def scaling(keys: Sequence[str], budget_s: float) -> Generator[Scaling]:
    """Two-thread scaling of the cases of these keys, each as soon as it is known."""
    for values in ask({"job": "scaling", "keys": list(keys), "budget_s": budget_s}):
        yield Scaling(**values)


def memory(length: int) -> Generator[Memory]:
    """Peak memory of both passes on both sides, each in a process of its own.

    Args:
        length: queries and keys.
    """
    for dtype in _DTYPES:
        for backward in (False, True):
            for side in ("ours", "torch"):
                job = {"job": "memory", "length": length, "dtype": dtype, "side": side}
                for values in ask({**job, "backward": backward}):
                    yield Memory(**values)


def environment() -> dict[str, str]:
    """This process's environment, with the same tilewise first and threads that wait quietly.

    An OpenMP thread that spins while it waits takes the core that the next measurement needs; the
    setting is read when torch is loaded.
    """
    found = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    source = str(Path(tilewise.__file__).resolve().parent.parent)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (source, found.get("PYTHONPATH"))))
    return found


def ask(
    job: dict[str, Any],
    module: str = "tilelab.bench.worker",
    settings: Mapping[str, str] | None = None,
) -> Generator[dict[str, Any]]:
    """Yield the results of a job, one by one; the child ends when nobody listens any more.

    Args:
        job: what to do, for JSON.
        module: what does it, reading the job and printing a line of JSON for each result.
        settings: for its environment.

    Raises:
        TilewiseError: the child failed; the message holds its last words.
    """
    command = [sys.executable, "-m", module]
    with tempfile.TemporaryFile("w+") as errors:
        # A session of its own: Ctrl-C is the parent's to deal with.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment(), **(settings or {})},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job))
            process.stdin.close()
            for line in process.stdout:
                yield json.loads(line)
            if process.wait():
                errors.seek(0)
                words = "".join(errors.readlines()[-8:]).rstrip()
                raise TilewiseError(
                    f"the {job['job']} process ended with {process.returncode}\n{words}"
                )
        finally:
            process.kill()  # it holds nothing that needs an orderly end
            process.wait()
            process.stdout.close()
