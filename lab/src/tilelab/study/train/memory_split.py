"""Memory of a training step: weights, gradients, optimizer state, activations, peak.

The first four are sums over storages: exact, the same on every machine, each storage counted once
however many tensors share it. The peak is what the process (or the GPU's allocator) really held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilelab.common import memory
from tilelab.study.train.team import local

__all__ = [
    "PeakMeter",
    "gradients_bytes",
    "optimizer_bytes",
    "saved_bytes",
    "storage_bytes",
    "weights_bytes",
]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes behind some tensors, each storage once; of cut ones this process's."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def weights_bytes(model: nn.Module) -> int:
    """Return bytes of a model's parameters; tied ones count once."""
    return storage_bytes(model.parameters())


def gradients_bytes(model: nn.Module) -> int:
    """Return bytes of the gradients that a model's parameters hold now."""
    return storage_bytes(each.grad for each in model.parameters() if each.grad is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return bytes of an optimizer's state: moments, averages, step counters."""
    return storage_bytes(_tensors(dict(optimizer.state)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def saved_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Return ``run``'s result, and the bytes that autograd keeps of it for the backward pass.

    Each storage counts once, however many views of it are kept. Weights do not count, but their
    copies that autocast makes in a narrower type do.

    Args:
        run: a forward pass.
        weights: whose storages are left out.
    """
    storages: dict[int, int] = {}
    own = {local(weight).untyped_storage().data_ptr() for weight in weights}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result that its own graph saves would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return result, sum(size for address, size in storages.items() if address not in own)


class PeakMeter:
    """The most memory held while training, less what was held before the model was made.

    Make it before the model. Leave out what evaluations and checkpoints take on top: call ``pause``
    before them and ``resume`` after. With ``torch.compile`` the compiler's own memory counts too.

    Args:
        device: where the model will be; the process's memory for a CPU, else the allocator's.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._highest = 0
        memory.release()  # memory that is freed but kept would count as held before the model
        self._base = self._now()
        self.resume()

    def peak_bytes(self) -> int:
        """Return the peak so far."""
        return max(self._highest, self._peak())

    def pause(self) -> None:
        """Keep the peak so far: what comes next does not count."""
        self._highest = self.peak_bytes()

    def resume(self) -> None:
        """Count again from here on."""
        if self._cuda is None:
            memory.release()  # else what the pause has freed lies beside what training takes anew
            memory.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def _now(self) -> int:
        if self._cuda is None:
            return memory.resident_bytes()
        return int(torch.cuda.memory_allocated(self._cuda))

    def _peak(self) -> int:
        if self._cuda is None:
            return memory.peak_bytes() - self._base
        return int(torch.cuda.max_memory_allocated(self._cuda)) - self._base
