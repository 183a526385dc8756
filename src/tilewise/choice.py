"""Which calls of other code torch computes faster, as measured, and whether it may.

Calls of other code come through doors: ``tilewise.sdpa()``, the switch of timm, the function of
transformers, ``nn.MultiheadAttention``. They ask ``slower``. ``tilewise.attention`` itself, and
``nn.Attention``, are computed by tilewise always.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu.core import absence, core

_PREFERENCES = ("speed", "tilewise")


class Report:
    """Record of the calls that a door saw.

    Args:
        taken: how many calls tilewise computed.
        left: how many calls torch computed, by the reason why tilewise did not.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.left: Counter[str] = Counter()
        self._lock = Lock()

    @property
    def calls(self) -> int:
        """Return all of them."""
        return self.taken + sum(self.left.values())

    def note(self, reason: str | None) -> None:
        """Count a call that was taken (no reason) or left."""
        with self._lock:
            if reason is None:
                self.taken += 1
            else:
                self.left[reason] += 1

    def __repr__(self) -> str:
        return f"Report(taken={self.taken}, left={dict(self.left)})"

    def __str__(self) -> str:
        lines = [f"{self.taken} of {self.calls} calls taken"]
        lines += [f"  {count} left: {reason}" for reason, count in self.left.most_common()]
        return "\n".join(lines)


class Slower(NamedTuple):
    """Calls without a mask, or causal ones, that torch computes faster.

    Args:
        isa: the instruction set that tilewise runs.
        dtype: of q, k and v.
        gradient: whether autograd records the call.
        products: below so many multiply-adds of the forward pass, B Hq M N (D + Dv).
        ratio: torch's time over ours, at least and at most.
    """

    isa: str
    dtype: torch.dtype
    gradient: bool
    products: int
    ratio: tuple[float, float]


# From ``tilewise bench doors``: benchmarks/<chip>/suites/doors.json, to which a test holds it.
SLOWER = (Slower("avx512_amx", torch.float32, True, 9 << 20, (0.67, 0.96)),)


class _State:
    """State of the process."""

    preferred = "speed"
    left = Report()


def prefer(what: str) -> None:
    """Say what becomes of the calls of other code that torch computes faster, in this process.

    ``"speed"``, the default, leaves them to torch. ``"tilewise"`` takes them. A table of measured
    ratios says which these are (``tilewise.choice.SLOWER``): few, and on few processors. Neither
    counts for ``tilewise.attention``, which always computes what it is called for.

    Raises:
        InvalidArgument: ``what`` is another word.
    """
    if what not in _PREFERENCES:
        raise InvalidArgument("what", repr(what), "'speed' or 'tilewise'")
    _State.preferred = what


def preferred() -> str:
    """Return what ``prefer`` said last, or ``"speed"``."""
    return _State.preferred


def left_to_torch() -> Report:
    """Return the report of ``nn.MultiheadAttention`` and of the function of transformers.

    It counts the calls that these left to torch. ``tilewise.sdpa()`` and timm's switch have reports
    of their own.
    """
    return _State.left


def slower(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return why torch should compute a call without a mask, or a causal one; "" if it should not.

    Args:
        q: [B, Hq, M, D].
        k: [B, Hk, N, D].
        v: [B, Hk, N, Dv].
    """
    if _State.preferred != "speed" or q.device.type != "cpu" or absence() is not None:
        return ""
    for row in SLOWER:
        if q.dtype is row.dtype and row.isa == core().isa_active():
            gradient = torch.is_grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad
            )
            size = q.shape.numel() * k.shape[-2] + q.shape[:-1].numel() * v.shape[-2:].numel()
            if gradient is row.gradient and size < row.products:
                return _reason(row)
    return ""


def _reason(row: Slower) -> str:
    low, high = row.ratio
    dtype = str(row.dtype).removeprefix("torch.")
    what = "with gradients" if row.gradient else "without gradients"
    return (
        f"torch is faster ({1 / high:.2g} to {1 / low:.2g} times): {dtype} {what}, below "
        f"{row.products / 1e6:.0f} million products; tilewise.prefer('tilewise') takes it"
    )
