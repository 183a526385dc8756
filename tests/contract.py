"""The exactness contract, stated once.

A result is exact when its largest error is at most twice that of the plain implementation in the
same dtype, plus rounding of the output itself::

    max|actual - oracle| <= 2 max|plain - oracle| + 4 eps max(1, max|oracle|)

for out, lse, the statistics of rows and every gradient, where eps belongs to the dtype of that
output. The oracle is the plain mathematics in float64 (beyond it for float64). NaN and infinities
stand in the same places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LongArray = npt.NDArray[np.longdouble]


class InexactError(AssertionError):
    """The largest error is over the bound; ``ratio`` is how many times."""

    def __init__(self, message: str, ratio: float) -> None:
        super().__init__(message)
        self.ratio = ratio


def as_long(values: Tensor | npt.NDArray[Any]) -> LongArray:
    """The values in numpy's extended precision."""
    if isinstance(values, Tensor):
        values = values.detach().to(torch.float64).numpy()
    return values.astype(np.longdouble)


def bound(plain: LongArray, oracle: LongArray, eps: float) -> float:
    """The largest error that the contract allows."""
    finite = np.isfinite(plain) & np.isfinite(oracle)
    plain_error = np.abs(plain - oracle, where=finite, out=np.zeros_like(oracle))
    largest = np.abs(oracle[np.isfinite(oracle)]).max(initial=1.0)
    return float(2 * plain_error.max(initial=0.0) + 4 * eps * largest)


def assert_exact(
    actual: Tensor, plain: Tensor, oracle: Tensor | npt.NDArray[Any], name: str
) -> None:
    """Assert the contract for one output.

    Args:
        actual: what is tested.
        plain: the same from the plain implementation in the problem's dtype.
        oracle: the same in higher precision.
        name: of the output, for the message.
    """
    assert tuple(actual.shape) == tuple(oracle.shape), (
        f"{name}: shape {tuple(actual.shape)}, should be {tuple(oracle.shape)}"
    )
    got, truth, naive = as_long(actual), as_long(oracle), as_long(plain)
    _assert_same_specials(got, truth, name)
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(truth), np.abs(got - truth), 0)
        allowed = bound(naive, truth, torch.finfo(actual.dtype).eps)
    worst = float(error.max(initial=0))
    if worst <= allowed:
        return
    where = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    raise InexactError(
        f"{name} ({actual.dtype}): max error {worst:.3e} at {where} is {worst / allowed:.2f} times"
        f" the {allowed:.3e} allowed; got {float(got[where]):.9g}, plain"
        f" {float(naive[where]):.9g}, oracle {float(truth[where]):.9g};"
        f" {int((error > allowed).sum())} of {error.size} elements are over",
        worst / allowed,
    )


def _assert_same_specials(got: LongArray, truth: LongArray, name: str) -> None:
    for kind, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        differs = test(got) != test(truth)
        if differs.any():
            where = tuple(int(i) for i in np.argwhere(differs)[0])
            raise AssertionError(
                f"{name}: {kind} in the wrong places ({int(differs.sum())} of {got.size}), first at"
                f" {where}: got {float(got[where])}, oracle {float(truth[where])}"
            )


def assert_same_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    """Assert that two tensors hold the same bits (a NaN equals a NaN, 0 equals -0)."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(same.all()):
        return
    where = tuple((~same).nonzero()[0].tolist())
    raise AssertionError(
        f"{name}: {int((~same).sum())} of {same.numel()} elements differ, first at {where}: "
        f"{actual[where].item()!r} and {expected[where].item()!r}"
    )
