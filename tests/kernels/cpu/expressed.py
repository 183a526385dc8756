"""Cases whose masks and scores are expressions, whatever kernels may know them by."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from tests.cases import Case
from tests.oracle import attend, check_twice
from tests.variants.drawn import program_of
from tilelab.cases.variants import Draw
from tilewise.variants.lower import statistics_dtype
from tilewise.variants.trace import trace_mask, trace_score
from tilewise.variants.values import Mask, Score

Function = Callable[..., Any]
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
SIZES: dict[str, Any] = {"heads": 4, "queries": 70, "keys": 150, "head_dim": 16, "value_dim": 9}


def as_score(function: Function) -> Score:
    """The score of a function as an expression."""
    expr, tensors = trace_score(function)
    return Score(program_of(expr), tensors)


def as_mask(function: Function) -> Mask:
    """The same of a mask."""
    expr, tensors = trace_mask(function)
    return Mask(program_of(expr), tensors)


@dataclass(frozen=True)
class Expressed:
    """A maker of a mask or score; its text is the same in every process, and makes the numbers."""

    name: str
    function: Callable[[Draw], Function] = field(repr=False)
    of: Callable[[Function], Any] = field(default=as_score, repr=False)

    def __call__(self, drawn: Draw) -> Any:
        return self.of(self.function(drawn))


def learned(drawn: Draw, *shape: int) -> Tensor:
    """A captured tensor of the dtype that kernels read."""
    return drawn.normal(*shape, dtype=statistics_dtype(drawn.dtype)).requires_grad_()


def case_of(
    name: str,
    score: Callable[[Draw], Function] | None = None,
    mask: Function | None = None,
    **sizes: Any,
) -> Case:
    """A case of a score that is made for a problem, and of a mask."""
    return Case(
        name,
        **{**SIZES, **sizes},
        score=() if score is None else (Expressed(name, score),),
        mask=() if mask is None else (Expressed(name, lambda _: mask, as_mask),),
    )


def check(case: Case) -> None:
    """The contract for out, lse and every gradient, by the core.

    Few pairs have most of the error of a score that bends, so two draws are taken together.
    """
    check_twice(case, 2, lambda inputs, sent: attend(inputs, "cpu", sent))
