"""The exactness contract as assertions: the 2x rule of ``tilelab.common`` and equal bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tilelab.common.exactness import LongArray, as_long, judge

__all__ = [
    "InexactError",
    "LongArray",
    "as_long",
    "assert_all_exact",
    "assert_all_same_bits",
    "assert_exact",
    "assert_same_bits",
]


class InexactError(AssertionError):
    """The largest error is over the bound; ``ratio`` is how many times."""

    def __init__(self, message: str, ratio: float) -> None:
        super().__init__(message)
        self.ratio = ratio


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
    verdict = judge(actual, plain, oracle)
    if verdict.passes:
        return
    got, truth, naive = as_long(actual), as_long(oracle), as_long(plain)
    assert got.shape == truth.shape, f"{name}: {verdict.complaint}"
    if verdict.complaint:
        where = _first_special(got, truth)
        raise AssertionError(
            f"{name}: {verdict.complaint}, first at {where}: got {float(got[where])},"
            f" oracle {float(truth[where])}"
        )
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(truth), np.abs(got - truth), 0)
    where = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    raise InexactError(
        f"{name} ({actual.dtype}): max error {verdict.error:.3e} at {where} is"
        f" {verdict.ratio:.2f} times the {verdict.allowed:.3e} allowed; got"
        f" {float(got[where]):.9g}, plain {float(naive[where]):.9g}, oracle"
        f" {float(truth[where]):.9g}; {int((error > verdict.allowed).sum())} of {error.size}"
        " elements are over",
        verdict.ratio,
    )


def assert_all_exact(
    actual: Iterable[Tensor],
    plain: Iterable[Tensor],
    oracle: Iterable[Any],
    names: Iterable[str],
    of: str = "",
) -> None:
    """Assert the contract for several outputs, as many as there are names; ``of`` precedes each."""
    for one, two, three, name in zip(actual, plain, oracle, names, strict=True):
        assert_exact(one, two, three, of + name)


def _first_special(got: LongArray, truth: LongArray) -> tuple[int, ...]:
    """Return the first place where one is NaN or infinite and the other is not the same."""
    same = (got == truth) | (np.isnan(got) & np.isnan(truth))
    differs = ~same & ~(np.isfinite(got) & np.isfinite(truth))
    return tuple(int(i) for i in np.argwhere(differs)[0])


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


def assert_all_same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor], name: str) -> None:
    """Assert that the tensors of two results, as many of both, hold the same bits."""
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(one, other, f"{name}, tensor {index}")
