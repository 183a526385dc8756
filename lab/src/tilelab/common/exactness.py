"""The 2x rule: an error is at most twice the plain implementation's in the same dtype.

For out, lse, the statistics of rows and every gradient::

    max|actual - oracle| <= 2 max|plain - oracle| + 4 eps max(1, max|oracle|)

eps belongs to the dtype of that output. The oracle is the plain mathematics in float64, and beyond
it for float64. NaN and infinities stand in the same places. Tests, bench, GPU checks and tuning all
judge by this module. It needs torch and numpy alone, and tensors stay on their device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LongArray = npt.NDArray[np.longdouble]


class Verdict(NamedTuple):
    """How one output compares."""

    ratio: float  # the largest error as a share of what is allowed; 1 or less passes
    error: float  # the largest error
    allowed: float  # the largest error that the rule allows
    complaint: str = ""  # what else is wrong (shape, NaN, infinities); empty if nothing is

    @property
    def passes(self) -> bool:
        """Whether the rule holds."""
        return not self.complaint and self.ratio <= 1

    def fault(self, name: str) -> str:
        """Return what is wrong with the output of a name; an empty string if nothing is."""
        if self.passes:
            return ""
        if self.complaint:
            return f"{name}: {self.complaint}"
        return f"{name}: largest error {self.error:.2e}, allowed {self.allowed:.2e}"


def as_long(values: Tensor | npt.NDArray[Any]) -> LongArray:
    """Return the values in numpy's extended precision."""
    if isinstance(values, Tensor):
        values = values.detach().to(torch.float64).cpu().numpy()
    return values.astype(np.longdouble)


def judge(actual: Tensor, plain: Tensor, oracle: Tensor | npt.NDArray[Any]) -> Verdict:
    """Hold one output to the rule.

    ``actual`` is tested; its dtype gives eps. ``plain`` is the same from the plain implementation
    in the problem's dtype, ``oracle`` in float64, on the same device, or in numpy's extended
    precision.
    """
    for given in (actual, plain):
        if tuple(given.shape) != tuple(oracle.shape):
            said = f"shape {tuple(given.shape)}, should be {tuple(oracle.shape)}"
            return Verdict(float("inf"), float("inf"), 0.0, said)
    here: Any = torch if isinstance(oracle, Tensor) else np
    got, truth, naive = (_widest(x, here) for x in (actual, oracle, plain))
    if all(bool(here.isfinite(x).all()) for x in (got, truth, naive)):
        # The usual case: choosing elements takes ten times as long as all the rest.
        error, own, size = _largest(got - truth), _largest(naive - truth), _largest(truth)
    else:
        for kind, test in (("NaN", here.isnan), ("inf", here.isposinf), ("-inf", here.isneginf)):
            differs = int((test(got) != test(truth)).sum())
            if differs:
                said = f"{kind} in the wrong places, {differs} of {actual.numel()}"
                return Verdict(float("inf"), float("inf"), 0.0, said)
        finite = here.isfinite(truth)
        both = finite & here.isfinite(naive)
        error = _largest(got[finite] - truth[finite])
        own, size = _largest(naive[both] - truth[both]), _largest(truth[finite])
    eps = torch.finfo(actual.dtype).eps
    allowed = 2 * own + 4 * eps * max(1.0, size)
    return Verdict(error / allowed, error, allowed)


def _widest(values: Any, here: Any) -> Any:
    return values.detach().double() if here is torch else as_long(values)


def _largest(values: Any) -> float:
    return float(abs(values).max()) if math.prod(values.shape) else 0.0
