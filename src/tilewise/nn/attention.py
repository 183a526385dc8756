"""A multi-head attention layer over ``tilewise.attention``.

``Attention`` runs the same parameters through one of three implementations
(``implementations.py``), so that a model can be compared with itself by changing one argument.
Keys and values that it keeps from call to call are in the caches of ``tilewise.serving``.

Dimensions: B batch, Hq query heads, Hk key/value heads, M queries, N keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from tilewise.checks import check_whole
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.functional import MaskLike, ScoreLike, SoftmaxStats
from tilewise.head_rows import HeadNorm
from tilewise.nn.implementations import Ask, Implementation, implementation_of, with_statistics
from tilewise.nn.rotation import Rotary, longest, rotary
from tilewise.serving.caches import KVCache, PagedKVCache
from tilewise.validation import check_probability
from tilewise.variants.masks import causal
from tilewise.variants.values import Mask, Score, as_mask, as_score

_TOP_LEFT = causal("top_left").program


Cache: TypeAlias = KVCache | PagedKVCache


class Past:
    """What a cache has of the sequences of a call, before that call.

    Args:
        cache: of the layer.
        sequences: the B numbers of a ``PagedKVCache``; None for a ``KVCache``.
        x: what the layer is called with, [B, M, width].
    """

    def __init__(self, cache: Cache, sequences: Sequence[int] | None, x: Tensor) -> None:
        self._cache = cache
        self._sequences = sequences
        if isinstance(cache, PagedKVCache):
            if sequences is None or len(sequences) != x.shape[0]:
                came = "None" if sequences is None else f"{len(sequences)} of them"
                required = f"the numbers of the {x.shape[0]} sequences in x, for a cache of pages"
                raise InvalidArgument("sequences", came, required)
        elif not isinstance(cache, KVCache):
            required = "a KVCache or PagedKVCache of tilewise.serving"
            raise InvalidType("cache", f"a {type(cache).__name__}", required)
        elif sequences is not None:
            raise InvalidArgument("sequences", "numbers", "None: this cache has no pages")

    def positions(self, x: Tensor) -> Tensor:
        """Return the positions of the rows of ``x``, after the cached ones: [M] or [B, M]."""
        rows = torch.arange(x.shape[1], device=x.device)
        if isinstance(self._cache, KVCache):
            return rows + len(self._cache)
        lengths = [self._cache.length(sequence) for sequence in self._sequences or ()]
        return rows + torch.tensor(lengths, device=x.device)[:, None]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ask: Ask, implementation: Implementation
    ) -> Tensor:
        """Append keys and values, and attend to all that there are then.

        Raises:
            InvalidArgument: gradients or dropout are wanted, or a mask that counts from the left.
            Unsupported: pages with another implementation than "tilewise".
        """
        if q.requires_grad or k.requires_grad or v.requires_grad:
            fix = "Call it in torch.no_grad() or torch.inference_mode()."
            required = "one without: what is kept is detached"
            raise InvalidArgument("cache", "a call that wants gradients", required, fix)
        if ask.dropout_p:
            raise InvalidArgument("cache", "a call with dropout", "eval mode: module.eval()")
        if ask.mask is not None and ask.mask.program == _TOP_LEFT:
            required = "masks.causal(): with a cache the rows of a call are the last ones"
            raise InvalidArgument("mask", 'causal("top_left")', required)
        if isinstance(self._cache, KVCache):
            return self._over_one_piece(self._cache, q, k, v, ask, implementation)
        if implementation != "tilewise":
            fix = "use implementation='tilewise', or a KVCache"
            raise Unsupported(f"implementation {implementation!r} with a cache of pages", fix=fix)
        return self._over_pages(self._cache, q, k, v, ask)

    def _over_one_piece(
        self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor, ask: Ask, name: Implementation
    ) -> Tensor:
        run, before = implementation_of(name), len(cache)
        cache.append(k, v)
        if torch.compiler.is_compiling():
            return run(q, cache.keys, cache.values, ask)
        try:
            return run(q, cache.keys, cache.values, ask)
        except BaseException:  # a call that is made again would append its keys twice
            cache.truncate(before)
            raise

    def _over_pages(self, cache: PagedKVCache, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Tensor:
        sequences = self._sequences or ()
        before = [cache.length(sequence) for sequence in sequences]
        cache.append(sequences, k, v)
        mask, score, scale, sinks, _ = ask
        try:
            out: Tensor = cache.attend(
                sequences, q, mask=mask, score=score, scale=scale, sinks=sinks
            )
        except BaseException:
            for sequence, length in zip(sequences, before, strict=True):
                cache.truncate(sequence, length)
            raise
        return out


class Attention(nn.Module):
    """Multi-head attention with projections: out = attention(x Wq, c Wk, c Wv) Wo.

    ``c`` is ``x`` [B, M, width] (self-attention) or ``context`` [B, N, context_width]
    (cross-attention). Queries and keys are first normalised (``qk_norm``: RMSNorm over each head,
    learned weight), then rotated (``rotary``): on a CPU in one pass, see ``tilewise.nn.rotary``.

    Args:
        width: channels of ``x`` and of the output.
        heads: query heads Hq.
        kv_heads: key/value heads Hk, a divisor of ``heads``; None for ``heads``.
        head_dim: width of one head; None for ``width / heads``.
        context_width: channels of ``context``; None for ``width``.
        bias: whether the projections have a bias.
        qk_norm: normalise queries and keys.
        rotary: rotate queries and keys by their positions; None for no rotation.
        sinks: learn one logit per query head that joins the softmax's denominator.
        gate: multiply the heads' output by sigmoid(x Wg), Wg learned, before Wo (gated attention).
        mask: who sees whom, in every call; ``forward`` may narrow it further. A function is read
            anew in every call; one that is a module is a submodule. Tensors that a Mask or Score
            captures are no buffers: ``.to(device)`` does not move them.
        score: change of the scores in every call, likewise; ``forward`` may append to it.
        scale: factor of q.k; None for 1 / sqrt(head_dim).
        dropout_p: dropout of the probabilities in training mode, in [0, 1). The mask of
            ``"tilewise"`` is not the one that torch draws for the other two.
        implementation: ``"tilewise"``, ``"sdpa"`` or ``"plain"``; the attribute of that name may
            be changed at any time, the parameters are the same.

    Attributes:
        on_statistics: None, or called with the ``SoftmaxStats`` of every forward pass (without a
            cache), which come from the kernel's same pass; of ``"tilewise"`` only.

    Raises:
        InvalidArgument, InvalidType: numbers that do not fit together, an unknown implementation.

    Sources: Vaswani et al. (2017), section 3.2; grouped heads: Ainslie et al. (2023); QK-norm:
    Henry et al. (2020), with RMSNorm as in Qwen3; sinks: gpt-oss (2025); gate: Qiu et al., Gated
    Attention for Large Language Models (2025).
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
        gate: bool = False,
        mask: MaskLike = None,
        score: ScoreLike = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        implementation: Implementation = "tilewise",
    ) -> None:
        super().__init__()
        self.width, self.heads = check_whole("width", width, 1), check_whole("heads", heads, 1)
        self.kv_heads = heads if kv_heads is None else check_whole("kv_heads", kv_heads, 1)
        if heads % self.kv_heads:
            raise InvalidArgument("kv_heads", str(kv_heads), f"a divisor of heads={heads}")
        if head_dim is None and width % heads:
            fix = "Or name the head width: head_dim=."
            raise InvalidArgument("width", str(width), f"a multiple of heads={heads}", fix)
        self.head_dim = check_whole("head_dim", width // heads if head_dim is None else head_dim, 1)
        implementation_of(implementation)
        self.rotary = rotary
        self.mask = None if mask is None else _mask_to_keep(mask)
        self.score = None if score is None else _score_to_keep(score)
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else float(scale)
        self.dropout_p = check_probability("dropout_p", dropout_p)
        self.implementation: Implementation = implementation
        self.on_statistics: Callable[[SoftmaxStats], None] | None = None
        inner, inner_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        source = width if context_width is None else context_width
        self.context_width = check_whole("context_width", source, 1)
        self.query = nn.Linear(width, inner, bias=bias)
        self.key = nn.Linear(source, inner_kv, bias=bias)
        self.value = nn.Linear(source, inner_kv, bias=bias)
        self.output = nn.Linear(inner, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if gate else None
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
        cache: Cache | None = None,
        sequences: Sequence[int] | None = None,
    ) -> Tensor:
        """Attend from ``x`` to ``context``, to itself, or to a cache that ``x`` continues.

        With a cache, the rows of ``x`` are appended to it, and see all of it that the mask allows.
        A causal layer gives the same result for a sequence in pieces, however small, as in one
        (except for rounding). A call that raises leaves the cache with the keys that it had.

        In masks and scores, m counts the rows of the call, which are the last ones of all n.length.
        Masks and scores aligned to the bottom right mean the same with a cache and without. The
        built-in ones are aligned so by default.

        Args:
            x: [B, M, width].
            context: [B, N, context_width]; None for ``x``.
            mask: a further mask for this call; it and the module's own must both allow a pair.
            score: further scores for this call, applied after the module's own.
            positions: for the rotation of the queries, [M] or [B, M], on A axes [A, M] or
                [A, B, M]; None for 0, 1, ...
            context_positions: for the rotation of the keys, likewise; None for ``positions``.
                With both ``rotary`` and ``context``, both must be given.
            cache: a ``KVCache`` or ``PagedKVCache`` of ``tilewise.serving`` for this layer alone,
                with its kv_heads, head_dim and dtype. ``positions`` None then continue the cache's.
                No context, no gradients, no dropout.
            sequences: which sequences of a ``PagedKVCache`` the B items of ``x`` continue.

        Returns:
            [B, M, width].

        Raises:
            InvalidArgument: shapes that do not fit, positions that are missing, or what does not
                go with a cache.
            Unsupported: ``"sdpa"`` was asked for softcap or sinks, which it cannot say; pages were
                given, or statistics asked of, another implementation than ``"tilewise"``.
        """
        _check_input("x", x, self.width)
        if context is not None:
            _check_input("context", context, self.context_width)
        past = self._past(x, context, cache, sequences)
        source = x if context is None else context
        q = self._heads(self.query(x), self.heads)
        k = self._heads(self.key(source), self.kv_heads)
        v = self._heads(self.value(source), self.kv_heads)
        norm_of_q, norm_of_k = _in_rotation(self.rotary, self.query_norm, self.key_norm)
        if norm_of_q is None and self.query_norm is not None and self.key_norm is not None:
            # In the dtype of the weights: under autocast q and k come in a narrower one.
            q = self.query_norm(q.to(self.query_norm.weight.dtype))
            k = self.key_norm(k.to(self.key_norm.weight.dtype))
        if self.rotary is not None:
            if past is not None and positions is None:
                positions = self._on_axes(past.positions(x))
            at, at_keys = self._positions(x, context, positions, context_positions)
            how = self.rotary._asdict()
            if self.rotary.scaling is not None and self.rotary.scaling.dynamic:
                how["length"] = longest(at, at_keys)
            q = rotary(q, at, **how, norm=norm_of_q)
            k = rotary(k, at_keys, **how, norm=norm_of_k)
        q, k = q.to(v.dtype), k.to(v.dtype)
        ask = Ask(
            _both(self.mask, mask),
            _then(self.score, score),
            self.scale,
            self.sinks,
            self.dropout_p if self.training else 0.0,
        )
        if past is not None:
            out = past.attend(q, k, v, ask, self.implementation)
        elif self.on_statistics is not None:
            out, stats = with_statistics(q, k, v, ask, self.implementation)
            self.on_statistics(stats)
        else:
            out = implementation_of(self.implementation)(q, k, v, ask)
        rows = out.transpose(1, 2).flatten(2)
        if self.gate is not None:
            rows = rows * torch.sigmoid(self.gate(x))
        merged: Tensor = self.output(rows)
        return merged

    def extra_repr(self) -> str:
        """Return the settings that the submodules do not show."""
        parts = [f"heads={self.heads}", f"kv_heads={self.kv_heads}", f"head_dim={self.head_dim}"]
        optional = {"rotary": self.rotary, "mask": self.mask, "score": self.score}
        parts += [f"{name}={value!r}" for name, value in optional.items() if value is not None]
        return ", ".join([*parts, f"implementation={self.implementation!r}"])

    def _heads(self, projected: Tensor, heads: int) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D], a view."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, heads, self.head_dim).transpose(1, 2)

    def _past(
        self,
        x: Tensor,
        context: Tensor | None,
        cache: Cache | None,
        sequences: Sequence[int] | None,
    ) -> Past | None:
        if cache is None:
            if sequences is not None:
                raise InvalidArgument("sequences", "numbers without a cache", "a PagedKVCache too")
            return None
        if context is not None:
            raise InvalidArgument("cache", "one beside a context", "self-attention, or no cache")
        if self.rotary is not None and self.rotary.scaling is not None:
            kind = type(self.rotary.scaling)
            if kind.dynamic:
                came = f"one with {kind.__name__}, whose angles change as a sequence grows"
                raise InvalidArgument("cache", came, "a scaling of fixed angles, or no cache")
        return Past(cache, sequences, x)

    def _positions(
        self, x: Tensor, context: Tensor | None, queries: Tensor | None, keys: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if context is not None and (queries is None or keys is None):
            missing = "positions" if queries is None else "context_positions"
            required = "both positions and context_positions, with rotary and a context"
            raise InvalidArgument(missing, "None", required)
        if queries is None:
            queries = self._on_axes(torch.arange(x.shape[1], device=x.device))
        return queries, queries if keys is None else keys

    def _on_axes(self, positions: Tensor) -> Tensor:
        """Return positions of text, which are the same on every axis of M-RoPE."""
        if self.rotary is None or self.rotary.axes is None:
            return positions
        return positions.expand(max(self.rotary.axes) + 1, *positions.shape)


def _in_rotation(
    how: Rotary | None, *norms: nn.Module | None
) -> tuple[HeadNorm | None, HeadNorm | None]:
    """Return the norms of queries and keys for ``rotary``, which goes over the rows once for both.

    None where there is nothing to rotate, and where a norm is another module by now or has hooks,
    which want to be called.
    """
    found = [
        HeadNorm(each.weight, eps=each.eps)
        for each in norms
        if type(each) is nn.RMSNorm
        and each.eps is not None
        and not (each._forward_hooks or each._forward_pre_hooks)
        and not (each._backward_hooks or each._backward_pre_hooks)
    ]
    if how is None or len(found) < len(norms):
        return None, None
    return found[0], found[1]


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


def _check_input(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dim() != 3 or tensor.shape[2] != width:
        raise InvalidArgument(name, f"shape {list(tensor.shape)}", f"[B, S, {width}]")
