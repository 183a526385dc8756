"""The 2x rule on any device: the error is at most twice the plain implementation's.

In the words of ``tests/contract.py``, which states it for the tests::

    max|actual - oracle| <= 2 max|plain - oracle| + 4 eps max(1, max|oracle|)

NaN and infinities stand in the same places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Verdict", "judge"]


class Verdict(NamedTuple):
    """How one output compares.

    Args:
        ratio: the largest error as a share of what is allowed; 1 or less passes.
        error: the largest error.
        allowed: what is allowed.
        complaint: what else is wrong (shape, NaN, infinities); empty if nothing is.
    """

    ratio: float
    error: float
    allowed: float
    complaint: str = ""

    @property
    def passes(self) -> bool:
        """Whether the rule holds."""
        return not self.complaint and self.ratio <= 1


def judge(actual: Tensor, plain: Tensor, oracle: Tensor) -> Verdict:
    """Hold one output to the rule.

    Args:
        actual: what is tested; its dtype gives eps.
        plain: the same from the plain implementation in the problem's dtype.
        oracle: the same in float64, on the same device.
    """
    if actual.shape != oracle.shape:
        said = f"shape {tuple(actual.shape)}, should be {tuple(oracle.shape)}"
        return Verdict(float("inf"), float("inf"), 0.0, said)
    got, truth, naive = (x.detach().double() for x in (actual, oracle, plain))
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = int((test(got) != test(truth)).sum())
        if differs:
            said = f"{kind} in the wrong places, {differs} of {got.numel()}"
            return Verdict(float("inf"), float("inf"), 0.0, said)
    finite = truth.isfinite()
    error = _largest((got - truth)[finite])
    own = _largest((naive - truth)[finite & naive.isfinite()])
    eps = torch.finfo(actual.dtype).eps
    allowed = 2 * own + 4 * eps * max(1.0, _largest(truth[finite]))
    return Verdict(error / allowed, error, allowed)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
