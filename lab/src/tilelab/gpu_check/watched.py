"""Steps under the tools of NVIDIA: bytes of memory by ncu, and faults by compute-sanitizer.

Both are optional: where a tool is missing, or counters cannot be read, the rows say why, and that
is no failure. ``python -m tilelab.gpu_check.watched STEP SETTING JOB`` is the process that a tool
watches.

* ``traffic`` compares the bytes that attention moves with those that the model predicts. Only bytes
  read are compared; bytes written may still be in the cache when a kernel ends. ``ncu`` (Nsight
  Compute) empties the caches before each kernel, so every kernel is counted from cold memory. It
  counts only between the start and the stop of the profiler, at the clocks that the GPU has: by
  itself it would lock them, which a borrowed machine may forbid. Reading counters needs a right
  that many machines do not give (``ERR_NVGPUCTRPERM``).
* ``sanitize`` looks for accesses out of bounds, and for races in shared memory, in small problems.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

import tilewise
from tilelab.cases.case import Pass
from tilelab.cases.inputs import build
from tilelab.gpu_check import accuracy
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting, attend
from tilelab.peers.methods import ours
from tilelab.peers.work import Work, call_of, draw
from tilewise.errors import TilewiseError
from tilewise.plan.traffic.count import Traffic

_MODULE = "tilelab.gpu_check.watched"
TRAFFIC, SANITIZE = "traffic", "sanitize"
_REST_S = 5.0
_COUNTING_S = 35.0
_CHECKING_S = 70.0
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
JOBS = ("forward", "backward", "plain forward")
_REFUSED = "ERR_NVGPUCTRPERM"
_WIDTH = 64
_LENGTH, _HEADS = 4096, 32
_TINY_LENGTH, _TINY_HEADS = 64, 2
TOOLS = ("memcheck", "racecheck")
# One of each kind of kernel: causal, grouped, packed, random, a walk over tiles, decoding.
_CASES = ("causal D64", "grouped 8:2", "varlen", "dropout", "table of tiles", "one row")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
Bytes = dict[str, int]


class CannotWatch(TilewiseError):  # noqa: N818  no error of the check: a tool is not there
    """Why nothing can be counted or checked here."""


def _watch(
    tool: str,
    arguments: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run a command under a tool to its end, whatever its status."""
    name = tool.partition(" ")[0]
    program = shutil.which(name)
    if program is None:
        raise CannotWatch(f"{tool} is not installed")
    whole = [program, *arguments, *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(whole, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            out = err = ""
            with suppress(subprocess.TimeoutExpired):  # somebody else holds its pipes
                out, err = process.communicate(timeout=_REST_S)
            done = subprocess.CompletedProcess(whole, process.returncode, out, err)
            said = f"{name} was not done after {limit_s:.0f} s: {_last_words(done)}"
            raise CannotWatch(said.removesuffix(": ")) from None
        except BaseException:
            _end(process.pid)
            raise
    return subprocess.CompletedProcess(whole, process.returncode, out, err)


def _end(process: int) -> None:
    """End a process and all that it has started: what it watches would keep the GPU busy.

    They stay in this process's group, so that whoever ends that ends them too.
    """
    family = [process]
    for parent in family:
        family += [child for child, of in _parents() if of == parent]
    for each in family:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _parents() -> Iterator[tuple[int, int]]:
    """Yield every process, and the one that started it."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            # "7 (its name) S 1 ..", and a name may hold anything.
            yield int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of what a process printed, in one line."""
    return " ".join((done.stdout + done.stderr).split())[-200:]


def _command(step: str, setting: Setting, job: str) -> list[str]:
    return [sys.executable, "-m", _MODULE, step, json.dumps(asdict(setting)), job]


def count(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> list[Bytes]:
    """Count the bytes that every kernel of a process reads and writes, in order.

    Raises:
        CannotWatch: ncu is missing, refuses, or does not come to its end.
    """
    arguments = [
        *("--metrics", ",".join(METRICS), "--csv", "--print-units", "base"),
        *("--profile-from-start", "off", "--target-processes", "all"),
        *("--clock-control", "none"),
    ]
    done = _watch("ncu (Nsight Compute)", arguments, command, environment, limit_s)
    if _REFUSED in done.stdout + done.stderr:
        raise CannotWatch(f"counters cannot be read here: {_REFUSED}")
    if done.returncode != 0:
        raise CannotWatch(f"ncu ended with {done.returncode}: {_last_words(done)}")
    return bytes_of(done.stdout)


def bytes_of(printed: str) -> list[Bytes]:
    """Return the counts in what ncu printed: for each kernel, bytes by metric.

    Raises:
        CannotWatch: there is no table with these metrics in it.
    """
    lines = printed.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise CannotWatch("ncu printed no table: no kernel ran between start and stop")
    kernels: dict[str, Bytes] = {}
    for row in csv.DictReader(lines[head:]):
        name, unit, value = (row.get(f"Metric {part}") or "" for part in ("Name", "Unit", "Value"))
        if name not in METRICS:
            continue
        if unit != "byte":
            raise CannotWatch(f"{name} in {unit or 'no unit'}, not in bytes")
        kernels.setdefault(row["ID"], {})[name] = round(float(value.replace(",", "")))
    if not kernels or any(len(found) < len(METRICS) for found in kernels.values()):
        raise CannotWatch(f"ncu's table lacks {' or '.join(METRICS)}")
    return list(kernels.values())


def traffic(setting: Setting, job: str) -> Iterator[Row]:
    """Yield rows of the bytes read and written, counted and predicted."""
    model = predicted(setting, job)
    values: dict[str, object] = {"predicted_read": model.read, "predicted_written": model.written}
    if setting.self_test:
        _counted_call(setting, job)()
        yield Row(TRAFFIC, job, note="the self-test has no counters", values=values)
        return
    command = _command(TRAFFIC, setting, job)
    try:
        kernels = count(command, setting.environment(), _COUNTING_S)
    except CannotWatch as error:
        # Not "skipped", which is for want of time and a failure.
        yield Row(TRAFFIC, job, "unsupported", f"skipped: {error}", values)
        return
    read, written = (sum(kernel[name] for kernel in kernels) for name in METRICS)
    values |= {"read": read, "written": written, "kernels": len(kernels)}
    yield Row(TRAFFIC, job, values=values)


def predicted(setting: Setting, job: str) -> Traffic:
    """Predict the traffic to this chip's memory: each pass starts from cold caches.

    The self-test has no chip, and no cache then.
    """
    given = draw(_work(setting, job))
    explained = tilewise.explain(*given.leaves, backend=setting.backend)
    account = explained.account
    if account is None:  # the call itself says why the backend cannot
        return Traffic(())
    if job == "plain forward":
        return account.forward.plain
    moved = account.forward.ours if job == "forward" else account.backward.ours
    if explained.chip is None or setting.self_test:
        return moved
    return account.reaching(moved, explained.chip)


def _work(setting: Setting, job: str) -> Work:
    """Return a small attention: a kernel that is counted begins with cold caches."""
    length, heads = (_LENGTH, _HEADS) if not setting.self_test else (_TINY_LENGTH, _TINY_HEADS)
    passes: Pass = "backward" if job == "backward" else "forward"
    return setting.square(job, length, heads, _WIDTH, passes=passes)


def _counted_call(setting: Setting, job: str) -> Callable[[], object]:
    """Return the call to count; everything before the call is done here."""
    work = _work(setting, job)
    given = draw(work)
    if job == "plain forward":  # unscaled: one pass less, and the same matrices
        return lambda: torch.matmul((given.q @ given.k.mT).softmax(-1), given.v)
    return call_of(work, given, ours().make(work, given))


def to_sanitize(setting: Setting) -> list[str]:
    """Return a job for each tool and case."""
    dtype = str(setting.dtype).removeprefix("torch.")
    return [f"{tool} {dtype} {case}" for case in _CASES for tool in TOOLS]


def sanitize(setting: Setting, job: str) -> Iterator[Row]:
    """Yield one row: a job is a tool, and a job of the step ``accuracy``."""
    tool, _, name = job.partition(" ")
    if setting.self_test:
        _checked_call(setting, name)
        yield Row(SANITIZE, job, note="the self-test has no sanitizer")
        return
    command = _command(SANITIZE, setting, name)
    arguments = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    try:
        done = _watch("compute-sanitizer", arguments, command, setting.environment(), _CHECKING_S)
    except CannotWatch as error:
        yield Row(SANITIZE, job, "unsupported", f"skipped: {error}")
        return
    found = _SUMMARY.search(done.stdout)
    if found is None or done.returncode not in (0, 9):
        note = f"compute-sanitizer ended with {done.returncode}: {_last_words(done)}"
        yield Row(SANITIZE, job, "error", note)
        return
    count = int(found.group(1))
    said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    note = f"{count} found by {tool}" if count else ""
    values = {"count": count, "said": said[:40] if count else []}
    yield Row(SANITIZE, job, "wrong" if count or done.returncode else "ok", note, values)


def _checked_call(setting: Setting, job: str) -> None:
    """Run both passes of a case once; of what is no case, the job itself."""
    case = accuracy.case_of(setting, job)
    if case is None:
        for _ in accuracy.run(setting, job):
            pass
    else:
        attend(setting, build(case, device=setting.device), backward=True)
    setting.synchronize()


def main() -> None:
    """Do a job; of one that is counted once to compile it, and once more between start and stop."""
    step, setting, job = sys.argv[1], Setting(**json.loads(sys.argv[2])), sys.argv[3]
    if step == SANITIZE:
        _checked_call(setting, job)
        return
    call = _counted_call(setting, job)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
