"""Three ways to compute attention over the same q, k and v.

* ``"tilewise"``: ``tilewise.attention``, O(N) memory; says every mask and score.
* ``"sdpa"``: ``torch.nn.functional.scaled_dot_product_attention``; masks other than plain causal
  are materialised, and what that function cannot say raises ``Unsupported``.
* ``"plain"``: the textbook form in torch operations, which writes the M x N matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import AttentionResult, SoftmaxStats
from tilewise.reference.blocks import Block
from tilewise.reference.programs import apply_score, visible
from tilewise.routes import attention
from tilewise.variants.lower import Extent, lower_mask, lower_score, statistics_dtype
from tilewise.variants.masks import causal
from tilewise.variants.values import Mask, Score

Implementation = Literal["plain", "sdpa", "tilewise"]


class Ask(NamedTuple):
    """Arguments of an implementation other than q, k and v."""

    mask: Mask | None
    score: Score | None
    scale: float
    sinks: Tensor | None
    dropout_p: float


def _tilewise(q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Tensor:
    out = attention(q, k, v, **ask._asdict())
    assert isinstance(out, Tensor)  # a tuple comes only when more than the output is asked for
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Tensor:
    if ask.sinks is not None:
        fix = "use implementation='tilewise' or 'plain'"
        raise Unsupported("scaled_dot_product_attention has no sinks", fix=fix)
    is_causal = ask.score is None and _is_causal(ask.mask, q.shape[2], k.shape[2])
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if is_causal else _sdpa_mask(q, k, ask),
        dropout_p=ask.dropout_p,
        is_causal=is_causal,
        scale=ask.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _sdpa_mask(q: Tensor, k: Tensor, ask: Ask) -> Tensor | None:
    """The mask and the additive scores as the one tensor that sdpa takes (it kills dead rows)."""
    seen = None if ask.mask is None else _visible(ask.mask, q, k)
    if ask.score is None:
        return seen
    for instr in ask.score.program:
        if instr.op in ("softcap", "expr"):
            what = "softcap" if instr.op == "softcap" else "score function"
            fix = "use implementation='tilewise' or 'plain'"
            raise Unsupported(f"scaled_dot_product_attention has no {what}", fix=fix)
    # Every other score is additive, so that its effect on a zero score is the tensor to add.
    added = _scored(ask.score, q.new_zeros(1, 1, q.shape[2], k.shape[2]), q, k)
    return added if seen is None else added.masked_fill(~seen, -math.inf)


def _plain(q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Tensor:
    """softmax(mask(score(scale q k^T))) v, written out. Rows that see no key give 0."""
    return _written_out(q, k, v, ask)[0]


def with_statistics(
    q: Tensor, k: Tensor, v: Tensor, ask: Ask, name: Implementation
) -> tuple[Tensor, SoftmaxStats]:
    """Return the output of an implementation, and what the softmax of each row looked like.

    Raises:
        Unsupported: an implementation other than ``"tilewise"``, whose kernels say nothing of it.
    """
    if name != "tilewise":
        fix = "use implementation='tilewise', or set on_statistics to None"
        raise Unsupported(f"statistics of implementation {name!r}", fix=fix)
    found = attention(q, k, v, **ask._asdict(), return_stats=True)
    assert isinstance(found, AttentionResult)
    assert found.stats is not None
    return found.out, found.stats


def with_weights(q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
    """Return the plain implementation's output and its weights, those that dropout left.

    Returns:
        The output [B, Hq, M, D] and the weights [B, Hq, M, N]; 0 in rows that see no key.
    """
    out, weights, alive = _written_out(q, k, v, ask)
    return out, weights if alive is None else weights.masked_fill(~alive, 0.0)


def _written_out(q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the output, the weights, and which rows see a key (None for all), [.., M, 1]."""
    if q.shape[1] != k.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    weights, alive = _weights(q, k, ask)
    out = weights @ v
    return out if alive is None else out.masked_fill(~alive, 0.0), weights, alive


def _weights(q: Tensor, k: Tensor, ask: Ask) -> tuple[Tensor, Tensor | None]:
    """The weights, and which rows see a key; what they are in rows that see none has no meaning."""
    seen = None if ask.mask is None else _visible(ask.mask, q, k)
    scores = (q * ask.scale) @ k.transpose(-2, -1)  # [B, Hq, M, N]
    # Hidden pairs get the smallest finite score: -inf throughout a row would make its softmax NaN.
    lowest = torch.finfo(scores.dtype).min
    alive = None if seen is None else seen.any(dim=-1, keepdim=True)
    if ask.score is not None:
        scores = _scored(ask.score, scores, q, k).clamp_min(lowest)  # a bias may be -inf
    if seen is not None:
        scores = scores.masked_fill_(~seen, lowest)
    if ask.score is not None:
        alive = ~(scores <= lowest).all(dim=-1, keepdim=True)  # a NaN is alive
    if ask.sinks is not None:
        sink = ask.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : k.shape[2]]
    if ask.dropout_p > 0.0:
        probabilities = dropout(probabilities, ask.dropout_p)
    return probabilities, alive


_IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Ask], Tensor]] = {
    "plain": _plain,
    "sdpa": _sdpa,
    "tilewise": _tilewise,
}


def implementation_of(name: str) -> Callable[[Tensor, Tensor, Tensor, Ask], Tensor]:
    """Return the function of an implementation: (q, k, v, ask) -> out, [B, H, S, D] all."""
    run = _IMPLEMENTATIONS.get(name)
    if run is None:
        required = " or ".join(repr(known) for known in _IMPLEMENTATIONS)
        raise InvalidArgument("implementation", repr(name), required)
    return run


def _block(q: Tensor, k: Tensor) -> Block:
    """Return the whole score matrix as one block."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    floats = statistics_dtype(q.dtype)
    return Block(range(queries), range(keys), queries, keys, range(batch), range(heads), floats)


def _extent(q: Tensor, k: Tensor) -> Extent:
    checked = q.device.type == "cpu" and not torch.compiler.is_compiling()
    return Extent(q.shape[0], q.shape[1], q.shape[2], k.shape[2], check_values=checked)


def _visible(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """bool, broadcastable to [B, Hq, M, N]: the pairs that attend."""
    queries, keys = q.shape[2], k.shape[2]
    if mask.program == causal().program:  # what everybody writes, and no int64 M x N on the way
        return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    captured = lower_mask(mask.program, mask.captured, _extent(q, k), q.device, q.dtype)
    return visible(mask.program, captured, _block(q, k), q.device)


def _scored(score: Score, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the scores (broadcastable to [B, Hq, M, N]) after the score's program."""
    captured = lower_score(score.program, score.captured, _extent(q, k), q.dtype, q.device)
    return apply_score(score.program, captured, scores, _block(q, k))[0]


def _is_causal(mask: Mask | None, queries: int, keys: int) -> bool:
    """Return whether the mask is what sdpa calls is_causal, which is aligned to the top left."""
    if mask is None:
        return False
    square = queries == keys and mask.program == causal().program
    return square or mask.program == causal("top_left").program
