"""Nested (jagged) tensors as the packed ones of a variable-length call, and its results as nested.

A nested tensor [B, H, j, D] is packed already: its values are [H, T, D] and its offsets are
cu_seqlens. Nothing is padded and nothing is copied.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engine.call import Keywords
from tilewise.errors import InvalidArgument
from tilewise.problem import Result

_FORM = "a nested tensor [B, H, j, D] of layout torch.jagged, ragged in dimension 2"


class Packed(NamedTuple):
    """The packed tensors of a nested call."""

    q: Tensor
    k: Tensor
    v: Tensor
    keywords: Keywords


def any_nested(q: Any, k: Any, v: Any) -> bool:
    """Return whether a call has a nested tensor; of anything at all."""
    return any(getattr(x, "is_nested", False) is True for x in (q, k, v))


def packed(q: Any, k: Any, v: Any, keywords: Keywords) -> Packed:
    """Return the variable-length call that a nested one is.

    Raises:
        InvalidArgument: a tensor is not nested, not of the form, or has holes; k and v have other
            lengths; or the call has cu_seqlens as well.
    """
    if keywords.cu_seqlens is not None:
        required = "packed tensors [T, H, D]: a nested tensor has its own lengths"
        raise InvalidArgument("q, k, v", "nested tensors", required, "Call attention.")
    named = (("q", q), ("k", k), ("v", v))
    kinds = [name for name, x in named if getattr(x, "is_nested", False)]
    if len(kinds) < 3:
        came = "a nested tensor beside one that is not"
        raise InvalidArgument(kinds[0], came, "q, k and v all nested, or none of them")
    for name, x in named:
        _check(name, x)
    for name, x, like, other in (("k", k, q, "q"), ("v", v, k, "k")):
        if x.shape[0] != like.shape[0]:
            required = f"those of {other}, {like.shape[0]}"
            raise InvalidArgument(name, f"{x.shape[0]} sequences", required)
    if not _same_lengths(k, v):
        fix = "Make one from the other's offsets: torch.nested.nested_tensor_from_jagged."
        raise InvalidArgument("v", "sequences of other lengths than k's", "k's lengths", fix)
    cu_seqlens = (q.offsets(), k.offsets())
    rows_q, rows_k, rows_v = (x.values().transpose(0, 1) for x in (q, k, v))
    return Packed(rows_q, rows_k, rows_v, keywords._replace(cu_seqlens=cu_seqlens, plain=False))


def nested(result: Result, q: Any) -> Result:
    """Return a variable-length result with its rows nested as those of q; ``stats`` stay packed."""

    def of_rows(values: Tensor | None) -> Any:
        if values is None:
            return None
        return torch.nested.nested_tensor_from_jagged(values, q.offsets(), jagged_dim=2)

    return Result(
        of_rows(result.out.transpose(0, 1)),
        of_rows(result.lse),
        result.stats,
        of_rows(result.max_logit),
        of_rows(result.entropy),
        of_rows(result.top_key),
    )


def _check(name: str, x: Any) -> None:
    if x.layout is not torch.jagged:
        fix = "Make it with torch.nested.nested_tensor(parts, layout=torch.jagged)."
        raise InvalidArgument(name, f"a nested tensor of layout {x.layout}", _FORM, fix)
    ragged = x._ragged_idx
    if x.dim() != 4 or ragged != 2:
        raise InvalidArgument(
            name,
            f"a nested tensor of {x.dim()} dimensions, ragged in dimension {ragged}",
            _FORM,
            "x.unflatten(-1, (H, D)).transpose(1, 2) makes it of [B, j, H * D].",
        )
    if x.lengths() is not None:
        raise InvalidArgument(name, "a nested tensor with holes", "one without", "x.contiguous()")


def _same_lengths(k: Any, v: Any) -> bool:
    """Return whether two have the same lengths; on a device only a common origin can be seen."""
    if k.shape[2] == v.shape[2]:
        return True
    if torch.compiler.is_compiling() or not k.is_cpu:
        return False
    return torch.equal(k.offsets(), v.offsets())
