"""Small problems under compute-sanitizer: accesses out of bounds, and races in shared memory.

``python -m tilelab.gpu_check.sanitize SETTING JOB`` is the process that it watches. Where the tool
is not installed the rows say so, and that is no failure.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict

from tilelab.cases.inputs import build
from tilelab.gpu_check import accuracy
from tilelab.gpu_check.outcomes import attend
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.watched import CannotWatch, last_words, watch

STEP = "sanitize"
TOOLS = ("memcheck", "racecheck")
# One of each kind of kernel: causal, grouped, packed, random, a walk over tiles, decoding.
_CASES = ("causal D64", "grouped 8:2", "varlen", "dropout", "table of tiles", "one row")
_LIMIT_S = 70.0
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def jobs(setting: Setting) -> list[str]:
    """Return a job for each tool and case."""
    dtype = str(setting.dtype).removeprefix("torch.")
    return [f"{tool} {dtype} {case}" for case in _CASES for tool in TOOLS]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Yield one row: a job is a tool, and a job of the step ``accuracy``."""
    tool, _, name = job.partition(" ")
    if setting.self_test:
        _call(setting, name)
        yield Row(STEP, job, note="the self-test has no sanitizer")
        return
    command = [sys.executable, "-m", "tilelab.gpu_check.sanitize"]
    command += [json.dumps(asdict(setting)), name]
    arguments = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    try:
        done = watch("compute-sanitizer", arguments, command, setting.environment(), _LIMIT_S)
    except CannotWatch as error:
        yield Row(STEP, job, "unsupported", f"skipped: {error}")
        return
    found = _SUMMARY.search(done.stdout)
    if found is None or done.returncode not in (0, 9):
        note = f"compute-sanitizer ended with {done.returncode}: {last_words(done)}"
        yield Row(STEP, job, "error", note)
        return
    count = int(found.group(1))
    said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    note = f"{count} found by {tool}" if count else ""
    values = {"count": count, "said": said[:40] if count else []}
    yield Row(STEP, job, "wrong" if count or done.returncode else "ok", note, values)


def _call(setting: Setting, job: str) -> None:
    """Run both passes of a case once; of what is no case, the job itself."""
    case = accuracy.case_of(setting, job)
    if case is None:
        for _ in accuracy.run(setting, job):
            pass
    else:
        attend(setting, build(case, device=setting.device), backward=True)
    setting.synchronize()


def main() -> None:
    """Do a job."""
    _call(Setting(**json.loads(sys.argv[1])), sys.argv[2])


if __name__ == "__main__":
    main()
