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
from tilewise.kernels.cpu import absence, core

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
        ratio: torch's time over ours, at least and at most.
        products: how many multiply-adds the forward pass has, B Hq M N (D + Dv): at least so many,
            and less than so many.
        queries: M, at least and at most.
        alone: only where no heads share their keys.
    """

    isa: str
    dtype: torch.dtype
    gradient: bool
    ratio: tuple[float, float]
    products: tuple[int, int]
    queries: tuple[int, int] = (1, 1 << 62)
    alone: bool = False

    def holds(self, queries: int, products: int, alone: bool) -> bool:
        """Return whether a call of this instruction set, dtype and gradient is one of these."""
        (low, high), (fewest, most) = self.products, self.queries
        return low <= products < high and fewest <= queries <= most and alone >= self.alone


# From ``tilewise bench doors``: benchmarks/<chip>/suites/doors.json, to which a test holds it.
SLOWER = (
    Slower("avx512_amx", torch.float32, True, (0.63, 0.93), (0, 9_000_000)),
    Slower("avx512_amx", torch.float32, False, (0.8, 0.94), (0, 2_000_000), (1, 16), alone=True),
    Slower(
        "avx512_amx", torch.bfloat16, False, (0.87, 0.9), (1_000_000, 5_000_000), (1, 1), alone=True
    ),
    Slower("avx512_amx", torch.float16, False, (0.89, 0.89), (0, 300_000), (9, 16), alone=True),
    Slower("avx512_bf16", torch.float32, True, (0.7, 0.81), (0, 1_500_000)),
    Slower("avx2", torch.float32, True, (0.65, 0.87), (0, 3_000_000)),
)


class _State:
    """State of the process."""

    preferred = "speed"
    left = Report()


def prefer(what: str) -> None:
    """Say what becomes of the calls of other code that torch computes faster, in this process.

    ``"speed"``, the default, leaves them to torch. ``"tilewise"`` takes them. A table of measured
    ratios says which these are (``tilewise.preference.SLOWER``): few, and on few processors.
    Neither counts for ``tilewise.attention``, which always computes what it is called for.

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
            size = q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
            alone = q.shape[1] == k.shape[1]
            if gradient is row.gradient and row.holds(q.shape[-2], size, alone):
                return _reason(row)
    return ""


def _reason(row: Slower) -> str:
    low, high = row.ratio
    dtype = str(row.dtype).removeprefix("torch.")
    what = "with gradients" if row.gradient else "without gradients"
    few = f" of {row.queries[1]} queries at most" if row.queries[1] < 1 << 62 else ""
    return (
        f"torch is faster ({1 / high:.2g} to {1 / low:.2g} times): {dtype} {what}{few}, below "
        f"{row.products[1] / 1e6:.2g} million products; tilewise.prefer('tilewise') takes it"
    )
