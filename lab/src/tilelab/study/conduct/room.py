"""Room for runs: how many fit into memory at once, and a remedy where not even one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tilelab.common import memory
from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RunSpec
from tilelab.study.need import Need, host_need
from tilewise.errors import TilewiseError

__all__ = ["NotEnoughMemoryError", "available_bytes", "room_for"]


class NotEnoughMemoryError(TilewiseError):
    """A run would need more memory than there is."""


def available_bytes(device: str) -> int | None:
    """Memory of a device that new processes could take now; None where nobody knows."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return memory.available_bytes()


def room_for(
    runs: Sequence[RunSpec],
    jobs: int,
    available: int | None,
    needed: Callable[[RunConfig], Need] = host_need,
    processes: int = 1,
    kind: str = "memory",
) -> int:
    """Return how many of the runs may run at once.

    Args:
        runs: what is to be run.
        jobs: how many at most.
        available: bytes; None where nobody knows, and then nothing is refused.
        needed: what one process of a run takes of them.
        processes: of each run that share them.
        kind: what they are called.

    Returns:
        at most ``jobs``, at least 1.

    Raises:
        NotEnoughMemoryError: a single one needs more than there is.
    """
    if available is None or not runs:
        return jobs
    found = sorted(((needed(run.config), run) for run in runs), key=lambda each: -each[0].total)
    needs = [processes * each.total for each, _ in found]
    if needs[0] > available:
        raise NotEnoughMemoryError(_too_much(*found[0], available, processes, kind))
    while jobs > 1 and sum(needs[:jobs]) > available:
        jobs -= 1
    return jobs


def _too_much(wanted: Need, run: RunSpec, available: int, processes: int, kind: str) -> str:
    total = processes * wanted.total
    reads = wanted.reading > wanted.training
    parts = ("reading",) if reads else ("activations", "matrix", "state", "data")
    largest = max(parts, key=lambda part: getattr(wanted, part))
    words, fix = _REMEDIES[largest]
    size = processes * getattr(wanted, largest)
    several = f" in {processes} processes" if processes > 1 else ""
    return (
        f"arm {run.arm} of {run.experiment} needs about {_gb(total)} of {kind}{several}, and "
        f"{_gb(available)} are free. Most of it, {_gb(size)}, is {words}: {fix}"
    )


_REMEDIES = {
    "activations": (
        "what the backward pass reads again",
        "use a smaller training.batch (with more training.accumulation the step stays the same), "
        "a smaller model.context, or training.checkpointing=true",
    ),
    "matrix": (
        "the N x N matrices of its attention",
        "use attention.implementation=tilewise, which writes none, a smaller model.context or "
        "a smaller training.batch",
    ),
    "state": (
        "weights, gradients and optimizer state",
        "use a smaller model.width or fewer model.layers",
    ),
    "data": ("its data", "use less of it: a task.train_examples, or smaller files"),
    "reading": ("its data while it is read", "use smaller files"),
}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
