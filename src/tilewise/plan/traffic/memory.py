"""Count what attention has to hold at once, and what fits into a memory.

Counted for one model's attention: of every layer what the backward needs, and of the layer at work
what comes and goes. Weights, optimizer and the rest of the model are not in it. Plain attention is
counted as in ``plain``: its matrices have the operands' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewise.errors import InvalidArgument
from tilewise.plan.traffic.count import stored_row
from tilewise.plan.traffic.tiled import statistic_bytes
from tilewise.problem import Problem
from tilewise.variants.float8 import output_dtype

_MOST = 2**40  # of a batch or a length: beyond what any memory holds


class Held(NamedTuple):
    """Bytes held at the highest.

    Args:
        kept: of each layer, from its forward to its backward (nothing, without a backward).
        passing: of the layer at work, beside that.
    """

    kept: int
    passing: int

    def peak(self, layers: int = 1) -> int:
        """Return the peak of a model with this many layers."""
        return layers * self.kept + self.passing


class Fit(NamedTuple):
    """The largest of something that fits; 0 where not even one does."""

    plain: int
    tiled: int


def _operands(problem: Problem, dtype: torch.dtype | None = None) -> tuple[int, int, int]:
    """Bytes of q, of k and v together, and of out; q, k and v in another dtype if it is given."""
    e, rows = (dtype or problem.dtype).itemsize, problem.heads * problem.queries
    keys, widths = problem.kv_heads * problem.keys, (problem.head_dim, problem.value_dim)
    of_keys = sum(width * e if dtype else stored_row(problem, width) for width in widths)
    items = problem.batch if problem.layout == "dense" else 1
    return (
        items * rows * problem.head_dim * e,
        items * keys * of_keys,
        items * rows * problem.value_dim * output_dtype(problem.dtype).itemsize,
    )


def tiled_held(problem: Problem, training: bool = True) -> Held:
    """Ours: operands, output and three numbers a row; in the backward two more, and gradients."""
    q, kv, out = _operands(problem)
    items = problem.batch if problem.layout == "dense" else 1
    row = items * problem.heads * problem.queries * statistic_bytes(problem.dtype)
    if not training:
        return Held(0, q + kv + out + 3 * row)
    return Held(q + kv + out + 3 * row, out + q + kv + 2 * row)


def plain_held(problem: Problem, training: bool = True) -> Held:
    """Attention that writes its matrix.

    Kept for the backward: operands, the probabilities P and, with dropout, what was dropped and a
    byte a pair. The softmax has its input and its output at once; its backward P, dP and dS.
    Operands of eight bits lie beside their copies in bfloat16, in which all is done (``plain``).
    """
    if problem.layout != "dense":
        raise InvalidArgument("problem", "a variable-length one", "a dense one")
    wide = output_dtype(problem.dtype)
    q, kv, out = _operands(problem, wide)
    read = q + kv * (problem.heads // problem.kv_heads)
    stored = 0 if wide is problem.dtype else sum(_operands(problem)[:2])
    pairs = problem.batch * problem.heads * problem.queries * problem.keys
    matrix = pairs * wide.itemsize
    if not training:
        return Held(0, stored + read + out + 2 * matrix)
    kept = read + out + matrix + (matrix + pairs if problem.dropout_p else 0)
    return Held(kept, out + read + 2 * matrix)


def fit(problem: Problem, room: int, what: str, layers: int = 1, training: bool = True) -> Fit:
    """Return the largest batch, or the longest sequence, that fits.

    Args:
        problem: dense; all but ``what`` stays as it is.
        room: bytes.
        what: "batch", or "length" (queries and keys alike).
        layers: of the model.
        training: whether there is a backward.
    """
    if room < 1:
        raise InvalidArgument("fit", f"{room} bytes", "a memory, e.g. 24GB")
    if what not in ("batch", "length"):
        raise InvalidArgument("what", repr(what), '"batch" or "length"')

    def sized(size: int) -> Problem:
        if what == "batch":
            return problem._replace(batch=size)
        return problem._replace(queries=size, keys=size)

    def largest(held: Callable[[Problem, bool], Held]) -> int:
        low, high = 0, _MOST
        while low < high:  # what is held grows with the size
            middle = (low + high + 1) // 2
            if held(sized(middle), training).peak(layers) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    return Fit(largest(plain_held), largest(tiled_held))
