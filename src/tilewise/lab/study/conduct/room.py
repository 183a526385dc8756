"""Room for runs: how many fit into memory at once, and a remedy where not even one does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.errors import TilewiseError
from tilewise.lab import memory
from tilewise.lab.study.need import need
from tilewise.lab.study.plan import Task

__all__ = ["NotEnoughMemoryError", "available_bytes", "room_for"]


class NotEnoughMemoryError(TilewiseError):
    """A run would need more memory than there is."""


def available_bytes(device: str) -> int | None:
    """Memory of a device that new processes could take now; None where nobody knows."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return memory.available_bytes()


def room_for(tasks: Sequence[Task], jobs: int, available: int | None, device: str = "cpu") -> int:
    """How many of the tasks may run at once.

    Args:
        tasks: what is to be run.
        jobs: how many at most.
        available: bytes; None where nobody knows, and then nothing is refused.
        device: where they run.

    Returns:
        at most ``jobs``, at least 1.

    Raises:
        NotEnoughMemoryError: a single one needs more than there is.
    """
    if available is None or not tasks:
        return jobs
    needs = sorted((need(task.run.config, device).total for task in tasks), reverse=True)
    if needs[0] > available:
        worst = max(tasks, key=lambda task: need(task.run.config, device).total)
        raise NotEnoughMemoryError(_too_much(worst, available, device))
    while jobs > 1 and sum(needs[:jobs]) > available:
        jobs -= 1
    return jobs


def _too_much(task: Task, available: int, device: str) -> str:
    run, wanted = task.run, need(task.run.config, device)
    largest = max(("activations", "matrix", "state"), key=lambda part: getattr(wanted, part))
    words, fix = _REMEDIES[largest]
    size = getattr(wanted, largest)
    return (
        f"arm {run.arm} of {run.experiment} needs about {_gb(wanted.total)} of memory, and "
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
}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
