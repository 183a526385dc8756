"""Bytes of memory that attention moves, counted by ncu, beside those that the model predicts.

The check is optional: where counters cannot be read, the rows say why, and that is no failure. Only
bytes read are compared; bytes written may still be in the cache when a kernel ends.
``python -m tilelab.gpu_check.traffic SETTING JOB`` is the process that ncu watches.

``ncu`` (Nsight Compute) empties the caches before each kernel, so every kernel is counted from cold
memory. It counts only between the start and the stop of the profiler, at the clocks that the GPU
has: by itself it would lock them, which a borrowed machine may forbid. Reading counters needs a
right that many machines do not give (``ERR_NVGPUCTRPERM``).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

import tilewise
from tilelab.cases.case import Pass
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.watched import CannotWatch, last_words, watch
from tilelab.peers.methods import ours
from tilelab.peers.work import Work, call_of, draw
from tilewise.plan.traffic.count import Traffic

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
Bytes = dict[str, int]
_REFUSED = "ERR_NVGPUCTRPERM"


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
    done = watch("ncu (Nsight Compute)", arguments, command, environment, limit_s)
    if _REFUSED in done.stdout + done.stderr:
        raise CannotWatch(f"counters cannot be read here: {_REFUSED}")
    if done.returncode != 0:
        raise CannotWatch(f"ncu ended with {done.returncode}: {last_words(done)}")
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


STEP = "traffic"
JOBS = ("forward", "backward", "plain forward")
_LIMIT_S = 35.0
_WIDTH = 64
_LENGTH, _HEADS = 4096, 32
_TINY_LENGTH, _TINY_HEADS = 64, 2


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Yield rows of the bytes read and written, counted and predicted."""
    model = predicted(setting, job)
    values: dict[str, object] = {"predicted_read": model.read, "predicted_written": model.written}
    if setting.self_test:
        _call(setting, job)()
        yield Row(STEP, job, note="the self-test has no counters", values=values)
        return
    command = [sys.executable, "-m", "tilelab.gpu_check.traffic"]
    command += [json.dumps(asdict(setting)), job]
    try:
        kernels = count(command, setting.environment(), _LIMIT_S)
    except CannotWatch as error:
        # Not "skipped", which is for want of time and a failure.
        yield Row(STEP, job, "unsupported", f"skipped: {error}", values)
        return
    read, written = (sum(kernel[name] for kernel in kernels) for name in METRICS)
    values |= {"read": read, "written": written, "kernels": len(kernels)}
    yield Row(STEP, job, values=values)


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
    return (
        moved
        if explained.chip is None or setting.self_test
        else account.reaching(moved, explained.chip)
    )


def _work(setting: Setting, job: str) -> Work:
    """Return a small attention: a kernel that is counted begins with cold caches."""
    length, heads = (_LENGTH, _HEADS) if not setting.self_test else (_TINY_LENGTH, _TINY_HEADS)
    passes: Pass = "backward" if job == "backward" else "forward"
    return setting.square(job, length, heads, _WIDTH, passes=passes)


def _call(setting: Setting, job: str) -> Callable[[], object]:
    """Return the call to count; everything before the call is done here."""
    work = _work(setting, job)
    given = draw(work)
    if job == "plain forward":  # unscaled: one pass less, and the same matrices
        return lambda: torch.matmul((given.q @ given.k.mT).softmax(-1), given.v)
    return call_of(work, given, ours().make(work, given))


def main() -> None:
    """Do a job once to compile it, and once more between start and stop of the profiler."""
    setting, job = Setting(**json.loads(sys.argv[1])), sys.argv[2]
    call = _call(setting, job)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
