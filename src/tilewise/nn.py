"""Modules: a multi-head attention layer over ``tilewise.attention``, and rotary position embedding.

``Attention`` runs the same parameters through one of three implementations, so that a model can be
compared with itself by changing one argument:

* ``"tilewise"``: ``tilewise.attention``, O(N) memory; says every mask and score.
* ``"sdpa"``: ``torch.nn.functional.scaled_dot_product_attention``; masks other than plain causal
  are materialised, and what that function cannot say raises ``Unsupported``.
* ``"plain"``: the textbook form in torch operations, which writes the M x N matrix.

Dimensions: B batch, Hq query heads, Hk key/value heads, M queries, N keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.functional import MaskLike, ScoreLike, attention
from tilewise.reference.blocks import Block
from tilewise.reference.programs import apply_score, visible
from tilewise.variants.lower import Extent, lower_mask, lower_score, statistics_dtype
from tilewise.variants.masks import Mask, causal
from tilewise.variants.scores import Score
from tilewise.variants.values import as_mask, as_score

__all__ = ["Attention", "Implementation", "Rotary", "rotary"]

Implementation = Literal["plain", "sdpa", "tilewise"]


class Rotary(NamedTuple):
    """How ``Attention`` rotates queries and keys: see ``rotary`` for the formula.

    Args:
        base: the base of the geometric series of wavelengths.
        dim: how many leading channels of a head are rotated, even; None for all of them.
    """

    base: float = 10000.0
    dim: int | None = None


def rotary(
    x: Tensor, positions: Tensor, *, base: float = 10000.0, dim: int | None = None
) -> Tensor:
    """Rotary position embedding: turn channel pairs by an angle proportional to the position.

    For i < dim/2, with angle = position * base ** (-2 i / dim)::

        out[i]         = x[i] * cos(angle) - x[i + dim/2] * sin(angle)
        out[i + dim/2] = x[i + dim/2] * cos(angle) + x[i] * sin(angle)

    Channels from ``dim`` on are copied. This pairing of halves is that of GPT-NeoX and Llama.
    Angles are computed in float32 (float64 for float64), as is the rotation of half types.

    Args:
        x: queries or keys, [B, H, S, D].
        positions: integer or floating, [S] or [B, S].
        base: the base of the geometric series, above 0.
        dim: rotated channels, even, in [2, D]; None for D.

    Returns:
        [B, H, S, D], the dtype of ``x``.

    Raises:
        InvalidArgument: an odd or too large ``dim``, a ``base`` not above 0, or positions that do
            not fit ``x``.

    Source: Su et al., RoFormer (2021), equation 15.
    """
    width = x.shape[-1]
    dim = width if dim is None else dim
    if dim % 2 or not 2 <= dim <= width:
        raise InvalidArgument("dim", str(dim), f"an even number from 2 to the head width {width}")
    if not (math.isfinite(base) and base > 0):
        raise InvalidArgument("base", str(base), "a finite number above 0")
    if positions.shape not in ((x.shape[2],), (x.shape[0], x.shape[2])):
        came, required = f"shape {list(positions.shape)}", f"[S] or [B, S] of x {list(x.shape)}"
        raise InvalidArgument("positions", came, required)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, dim, 2, device=x.device, dtype=work) / dim
    angles = positions.to(work)[..., None] * base**-exponents  # [S, dim/2] or [B, S, dim/2]
    if positions.dim() == 2:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., : dim // 2].to(work), x[..., dim // 2 : dim].to(work)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([part.to(x.dtype) for part in turned] + [x[..., dim:]], dim=-1)


class _Ask(NamedTuple):
    """What is asked of an implementation, beside q, k and v."""

    mask: Mask | None
    score: Score | None
    scale: float
    sinks: Tensor | None
    dropout_p: float


class Attention(nn.Module):
    """Multi-head attention with projections: out = attention(x Wq, c Wk, c Wv) Wo.

    ``c`` is ``x`` (self-attention) or ``context`` (cross-attention). Queries and keys are first
    normalised (``qk_norm``: RMSNorm over each head, learned weight), then rotated (``rotary``).

    Args:
        width: channels of ``x`` and of the output.
        heads: query heads Hq.
        kv_heads: key/value heads Hk, a divisor of ``heads``; None for ``heads``.
        head_dim: width of one head; None for ``width / heads``.
        context_width: channels of ``context``; None for ``width``.
        bias: whether the four projections have a bias.
        qk_norm: normalise queries and keys.
        rotary: rotate queries and keys by their positions; None for no rotation.
        sinks: learn one logit per query head that joins the softmax's denominator.
        mask: who sees whom, in every call; ``forward`` may narrow it further. A function is read
            anew in every call; one that is a module is a submodule. Tensors that a Mask or Score
            captures are no buffers: ``.to(device)`` does not move them.
        score: change of the scores in every call, likewise; ``forward`` may append to it.
        scale: factor of q.k; None for 1 / sqrt(head_dim).
        dropout_p: dropout of the probabilities in training mode, in [0, 1). The mask of
            ``"tilewise"`` is not the one that torch draws for the other two.
        implementation: ``"tilewise"``, ``"sdpa"`` or ``"plain"``; the attribute of that name may
            be changed at any time, the parameters are the same.

    Raises:
        InvalidArgument, InvalidType: numbers that do not fit together, an unknown implementation.

    Sources: Vaswani et al. (2017), section 3.2; grouped heads: Ainslie et al. (2023); QK-norm:
    Henry et al. (2020), with RMSNorm as in Qwen3; sinks: gpt-oss (2025).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_width: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        rotary: Rotary | None = None,
        sinks: bool = False,
        mask: MaskLike = None,
        score: ScoreLike = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        implementation: Implementation = "tilewise",
    ) -> None:
        super().__init__()
        self.width, self.heads = _positive("width", width), _positive("heads", heads)
        self.kv_heads = heads if kv_heads is None else _positive("kv_heads", kv_heads)
        if heads % self.kv_heads:
            raise InvalidArgument("kv_heads", str(kv_heads), f"a divisor of heads={heads}")
        if head_dim is None and width % heads:
            fix = "Or name the head width: head_dim=."
            raise InvalidArgument("width", str(width), f"a multiple of heads={heads}", fix)
        self.head_dim = width // heads if head_dim is None else _positive("head_dim", head_dim)
        if not 0.0 <= dropout_p < 1.0:
            raise InvalidArgument("dropout_p", str(dropout_p), "a number in [0, 1)")
        _implementation(implementation)
        self.rotary = rotary
        self.mask = None if mask is None else _mask_to_keep(mask)
        self.score = None if score is None else _score_to_keep(score)
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else float(scale)
        self.dropout_p = dropout_p
        self.implementation: Implementation = implementation
        inner, inner_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        source = width if context_width is None else _positive("context_width", context_width)
        self.context_width = source
        self.query = nn.Linear(width, inner, bias=bias)
        self.key = nn.Linear(source, inner_kv, bias=bias)
        self.value = nn.Linear(source, inner_kv, bias=bias)
        self.output = nn.Linear(inner, width, bias=bias)
        self.query_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: MaskLike = None,
        score: ScoreLike = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``x`` to ``context``, or to itself.

        Args:
            x: [B, M, width].
            context: [B, N, context_width]; None for ``x``.
            mask: a further mask for this call: both it and the module's own must allow a pair.
            score: further scores for this call, applied after the module's own.
            positions: for the rotation of the queries, [M] or [B, M]; None for 0, 1, ...
            context_positions: for the rotation of the keys, [N] or [B, N]; None for ``positions``.
                With both ``rotary`` and ``context``, both must be given.

        Returns:
            [B, M, width].

        Raises:
            InvalidArgument: shapes that do not fit, or positions that are missing.
            Unsupported: ``"sdpa"`` was asked for softcap or sinks, which it cannot say.
        """
        _check_input("x", x, self.width)
        if context is not None:
            _check_input("context", context, self.context_width)
        source = x if context is None else context
        q = self._heads(self.query(x), self.heads)
        k = self._heads(self.key(source), self.kv_heads)
        v = self._heads(self.value(source), self.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            # In the dtype of the weights: under autocast q and k come in a narrower one.
            q = self.query_norm(q.to(self.query_norm.weight.dtype))
            k = self.key_norm(k.to(self.key_norm.weight.dtype))
        if self.rotary is not None:
            at, at_keys = self._positions(x, context, positions, context_positions)
            q = rotary(q, at, **self.rotary._asdict())
            k = rotary(k, at_keys, **self.rotary._asdict())
        q, k = q.to(v.dtype), k.to(v.dtype)
        ask = _Ask(
            _both(self.mask, mask),
            _then(self.score, score),
            self.scale,
            self.sinks,
            self.dropout_p if self.training else 0.0,
        )
        out = _implementation(self.implementation)(q, k, v, ask)
        merged: Tensor = self.output(out.transpose(1, 2).flatten(2))
        return merged

    def extra_repr(self) -> str:
        """The settings that the submodules do not show."""
        parts = [f"heads={self.heads}", f"kv_heads={self.kv_heads}", f"head_dim={self.head_dim}"]
        optional = {"rotary": self.rotary, "mask": self.mask, "score": self.score}
        parts += [f"{name}={value!r}" for name, value in optional.items() if value is not None]
        return ", ".join([*parts, f"implementation={self.implementation!r}"])

    def _heads(self, projected: Tensor, heads: int) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D], a view."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, heads, self.head_dim).transpose(1, 2)

    def _positions(
        self, x: Tensor, context: Tensor | None, queries: Tensor | None, keys: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if context is not None and (queries is None or keys is None):
            missing = "positions" if queries is None else "context_positions"
            required = "both positions and context_positions, with rotary and a context"
            raise InvalidArgument(missing, "None", required)
        if queries is None:
            queries = torch.arange(x.shape[1], device=x.device)
        return queries, queries if keys is None else keys


def _tilewise(q: Tensor, k: Tensor, v: Tensor, ask: _Ask) -> Tensor:
    out = attention(q, k, v, **ask._asdict())
    assert isinstance(out, Tensor)  # a tuple comes only when more than the output is asked for
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, ask: _Ask) -> Tensor:
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


def _sdpa_mask(q: Tensor, k: Tensor, ask: _Ask) -> Tensor | None:
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


def _plain(q: Tensor, k: Tensor, v: Tensor, ask: _Ask) -> Tensor:
    """softmax(mask(score(scale q k^T))) v, written out. Rows that see no key give 0."""
    if q.shape[1] != k.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
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
        alive = (scores > lowest).any(dim=-1, keepdim=True)
    if ask.sinks is not None:
        sink = ask.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : k.shape[2]]
    if ask.dropout_p > 0.0:
        probabilities = dropout(probabilities, ask.dropout_p)
    out = probabilities @ v
    return out if alive is None else out.masked_fill(~alive, 0.0)


_IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, _Ask], Tensor]] = {
    "plain": _plain,
    "sdpa": _sdpa,
    "tilewise": _tilewise,
}


def _implementation(name: str) -> Callable[[Tensor, Tensor, Tensor, _Ask], Tensor]:
    run = _IMPLEMENTATIONS.get(name)
    if run is None:
        required = " or ".join(repr(known) for known in _IMPLEMENTATIONS)
        raise InvalidArgument("implementation", repr(name), required)
    return run


def _block(q: Tensor, k: Tensor) -> Block:
    """The whole score matrix as one block."""
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
    """The scores (broadcastable to [B, Hq, M, N]) after the score's program."""
    captured = lower_score(score.program, score.captured, _extent(q, k), q.dtype, q.device)
    return apply_score(score.program, captured, scores, _block(q, k))[0]


def _is_causal(mask: Mask | None, queries: int, keys: int) -> bool:
    """Whether the mask is what sdpa calls is_causal, which is aligned to the top left."""
    if mask is None:
        return False
    square = queries == keys and mask.program == causal().program
    return square or mask.program == causal("top_left").program


def _mask_to_keep(mask: MaskLike) -> MaskLike:
    """A mask that is known to be one; a function stays a function, for what it reads changes."""
    found = as_mask(mask)
    return mask if callable(mask) else found


def _score_to_keep(score: ScoreLike) -> ScoreLike:
    found = as_score(score)
    changing = callable(score) or (isinstance(score, Sequence) and any(map(callable, score)))
    return score if changing else found


def _both(first: MaskLike, second: MaskLike) -> Mask | None:
    if first is None or second is None:
        only = first if second is None else second
        return None if only is None else as_mask(only)
    return as_mask(first) & as_mask(second)


def _then(first: ScoreLike, second: ScoreLike) -> Score | None:
    if first is None or second is None:
        only = first if second is None else second
        return None if only is None else as_score(only)
    return as_score([as_score(first), as_score(second)])


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(name, f"a {type(value).__name__}", "an integer, 1 or more")
    if value < 1:
        raise InvalidArgument(name, str(value), "an integer, 1 or more")
    return value


def _check_input(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dim() != 3 or tensor.shape[2] != width:
        raise InvalidArgument(name, f"shape {list(tensor.shape)}", f"[B, S, {width}]")
