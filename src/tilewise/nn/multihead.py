"""``torch.nn.MultiheadAttention`` over ``tilewise.attention``.

Letters: B batch, H heads, L queries, S keys, E ``embed_dim``, D = E / H.

Nested tensors [B, j, E] become rows packed one sequence after the other (``_Rows``), and back.
``torch.nn.TransformerEncoder`` makes them of padded batches in eval mode. Torch's masks become
masks and scores of ``tilewise.attention`` (``_said_by``).
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tilewise.checks import check_tensor
from tilewise.errors import InvalidArgument, SlowPathWarning
from tilewise.nn.implementations import Ask, with_weights
from tilewise.routes import attention_varlen, by_the_faster
from tilewise.variants import masks, scores
from tilewise.variants.values import Mask, Score, as_score

_FORM = "a nested tensor [B, j, E] without holes"
_KIND = "bool (True: does not attend) or a floating tensor, which is added to the scores"
_NOTHING = ~Mask(())
_CAUSAL = masks.causal("top_left")
# Torch's bool masks name the pairs that do not attend.
_HIDDEN = (~masks.dense(torch.zeros(1, dtype=torch.bool))).program


class _Rows(NamedTuple):
    """The rows of a nested tensor."""

    values: Tensor  # [T, E]
    cu_seqlens: Tensor  # [B + 1], where each sequence starts, and T
    # Of the sequences; where the layout is jagged torch's symbol for them, which equals that of
    # tensors of the same origin.
    lengths: Any


def _rows_of(name: str, nested: Any) -> _Rows:
    """Return the rows of a nested tensor; of a jagged one they are its own memory."""
    if not nested.is_nested:
        raise InvalidArgument(name, "a tensor that is not nested", f"{_FORM}, as the others are")
    if nested.dim() != 3:
        raise InvalidArgument(name, f"a nested tensor of {nested.dim()} dimensions", _FORM)
    if nested.layout is torch.jagged:
        if nested.lengths() is not None or nested._ragged_idx != 1:
            raise InvalidArgument(name, "one with holes, or ragged elsewhere", _FORM)
        return _Rows(nested.values(), nested.offsets(), nested.shape[1])
    parts = nested.unbind()
    lengths = tuple([part.shape[0] for part in parts])
    ends = torch.tensor([0, *lengths], device=nested.device).cumsum(0)
    return _Rows(torch.cat(parts), ends, lengths)


def _check_same(name: str, rows: _Rows, others: _Rows, other: str) -> None:
    """Check that two have sequences of the same lengths.

    Jagged ones on a device, and while torch.compile traces, have to be of the same origin.
    """
    same = rows.lengths == others.lengths
    if not same and rows.cu_seqlens.is_cpu and not torch.compiler.is_compiling():
        same = torch.equal(rows.cu_seqlens, others.cu_seqlens)
    if not same:
        fix = "Make jagged ones from the same offsets: torch.nested.nested_tensor_from_jagged."
        raise InvalidArgument(name, "sequences of other lengths", f"those of {other}", fix)


def _nested_as(values: Tensor, rows: _Rows) -> Tensor:
    """Rows [T, E] as a nested tensor of the layout and lengths that others had."""
    if not isinstance(rows.lengths, tuple):
        return torch.nested.nested_tensor_from_jagged(values, rows.cu_seqlens)
    return torch.nested.as_nested_tensor(list(torch.split(values, list(rows.lengths))))


class MultiheadAttention(torch.nn.MultiheadAttention):
    """A drop-in for ``torch.nn.MultiheadAttention``, in O(L + S) memory where it may be.

    It is a ``torch.nn.MultiheadAttention`` with another ``forward``: the constructor, the names and
    the initial values of the parameters (for the same seed) and the state dict are torch's own.
    Every option of the constructor is covered: ``bias``, ``add_bias_kv``, ``add_zero_attn``,
    ``kdim``, ``vdim``, ``batch_first``, ``device``, ``dtype``; ``dropout`` is for training only,
    and drops other pairs than torch's for the same seed.

    **Pass need_weights=False.** Torch's default is ``need_weights=True``, and so it is here, for
    code that unpacks and uses the weights. They are L x S numbers per head. Such a call is computed
    in plain torch operations, in O(L S) memory, and warns once per process with a
    ``SlowPathWarning``.

    The module cannot know that its caller throws the weights away (``attn(x, x, x)[0]``). Set
    ``drop_weights = True`` on a module to run all its calls in the kernel, whatever they request,
    and return ``None`` as weights. ``tilewise.nn.convert(model, drop_weights=True)`` sets it in a
    model whose code is not yours.

    With ``need_weights=False``, masks run inside the kernel. Nothing of size [B, H, L, S] is
    written, and the masks are neither copied nor merged with each other. ``add_bias_kv`` and
    ``add_zero_attn`` do copy the masks, to add a column. The same holds in eval mode: torch's fast
    path is not taken.

    The few calls that torch computes faster are left to it, unless ``tilewise.prefer("tilewise")``
    was said; ``tilewise.left_to_torch()`` counts them.

    What differs from torch's:

    * A query that sees no key gives the bias of ``out_proj``, weights 0 and gradients 0. Torch
      gives NaN with ``need_weights=True`` and on its fast path in eval mode.
    * ``is_causal=True`` needs no ``attn_mask``: alone it means that query m sees keys 0 to m. With
      an ``attn_mask`` it is a hint, as in torch, that the mask is the causal one. The mask is then
      not read, unless it wants a gradient. Keys of ``add_bias_kv`` and ``add_zero_attn`` stay
      visible. A wrong hint gives a wrong result.
    * A bool mask together with a float mask is allowed.
    * Wrong shapes and dtypes raise ``InvalidArgument``, a ValueError, not AssertionError or
      RuntimeError.

    Source: Vaswani et al. (2017), section 3.2;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
    """

    drop_weights: bool = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from queries to keys.

        Args:
            query: [L, B, E]; with ``batch_first`` [B, L, E]; unbatched [L, E]. Or nested [B, j, E]
                with ``batch_first``, as key and value then are, and without masks and weights.
            key: [S, B, kdim] and so on.
            value: [S, B, vdim] and so on.
            key_padding_mask: [B, S] (unbatched [S]): bool, True for a key that nobody sees; or
                floats that are added to the scores, with a gradient.
            need_weights: return the weights too.
            attn_mask: [L, S] or [B * H, L, S] (unbatched [H, L, S]): bool, True for a pair that
                does **not** attend; or floats that are added to the scores, with a gradient.
            average_attn_weights: return the mean of the weights over heads.
            is_causal: query m sees keys 0 to m, and ``attn_mask``, if there is one, says just that.

        Returns:
            The output, shaped as query is with E features; and the weights as dropout left them,
            [B, L, S], per head [B, H, L, S], unbatched without B; or None. S counts the keys of
            ``add_bias_kv`` and ``add_zero_attn``, which come last.

        Raises:
            InvalidArgument: a shape or dtype that does not fit, by the argument's name.
        """
        need_weights = need_weights and not self.drop_weights
        if query.is_nested or key.is_nested or value.is_nested:
            _refuse_masks(key_padding_mask, attn_mask, need_weights)
            return self._nested(query, key, value, is_causal), None
        sizes = _check_shapes(query, key, value, key_padding_mask, attn_mask, self)
        batched = query.dim() == 3
        seq_first = batched and not self.batch_first
        q, k, v = self._heads(query, key, value, sizes, seq_first)
        said = _said_by(key_padding_mask, attn_mask, is_causal, sizes)
        weights = None
        if need_weights:
            out, weights = self._with_weights(q, k, v, said)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            out = by_the_faster(q, k, v, **self._keywords(said))
        order = (2, 0, 1, 3) if seq_first else (0, 2, 1, 3)
        out = linear(out.permute(order).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if batched:
            return out, weights
        return out.squeeze(0), None if weights is None else weights.squeeze(0)

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _keywords(self, said: _Masks) -> dict[str, Any]:
        """Return the keywords of a call of the kernel."""
        dropout_p = self._dropout()
        if dropout_p == 1.0:  # everything is dropped
            return {"mask": _NOTHING}
        return {**said._asdict(), "dropout_p": dropout_p}

    def _with_weights(self, q: Tensor, k: Tensor, v: Tensor, said: _Masks) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            _warn_of_weights()
        ask = Ask(*said, self.head_dim**-0.5, None, self._dropout())
        return with_weights(q, k, v, ask)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, sizes: _Sizes, seq_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k and v by heads [B, H, S, D], with the keys that the constructor adds."""
        q, k, v = self._projected(query, key, value)
        if query.dim() == 2:
            q, k, v = q[None], k[None], v[None]
        at = 0 if seq_first else 1
        k, v = self._appended(k, self.bias_k, at), self._appended(v, self.bias_v, at)
        order = (1, 2, 0, 3) if seq_first else (0, 2, 1, 3)
        apart = [_by_heads(x, sizes.heads).permute(order) for x in (q, k, v)]
        return apart[0], apart[1], apart[2]

    def _appended(self, rows: Tensor, learned: Tensor | None, at: int) -> Tensor:
        """Append to keys or values those that the constructor adds."""
        parts, one = [rows], list(rows.shape)
        one[at] = 1
        if learned is not None:
            parts.append(learned.to(rows.dtype).expand(one))
        if self.add_zero_attn:
            parts.append(rows.new_zeros(one))
        return torch.cat(parts, dim=at) if len(parts) > 1 else rows

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Q, k and v with E features each, by as few products as there are different inputs."""
        bias = self.in_proj_bias
        weight = self.in_proj_weight
        if weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            biases = [None] * 3 if bias is None else bias.chunk(3)
            parts = zip((query, key, value), weights, biases, strict=True)
            return tuple([linear(x, w, b) for x, w, b in parts])
        if query is key and key is value:
            return linear(query, weight, bias).chunk(3, dim=-1)
        own = self.embed_dim
        first = None if bias is None else bias[:own]
        q = linear(query, weight[:own], first)
        if key is value:
            rest = None if bias is None else bias[own:]
            return (q, *linear(key, weight[own:], rest).chunk(2, dim=-1))
        second, third = (None, None) if bias is None else bias[own:].chunk(2)
        of_k, of_v = weight[own:].chunk(2)
        return q, linear(key, of_k, second), linear(value, of_v, third)

    def _nested(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """Attention of nested tensors [B, j, E], packed one sequence after the other."""
        rows = _rows_of("query", query)
        keys = rows if key is query else _rows_of("key", key)
        values = keys if value is key else _rows_of("value", value)
        _check_same("value", values, keys, "key")
        packed = self._projected(rows.values, keys.values, values.values)
        q, k, v = (_by_heads(x, self.num_heads) for x in packed)
        keywords = self._keywords(_Masks(_CAUSAL if is_causal else None, None))
        out = attention_varlen(q, k, v, rows.cu_seqlens, keys.cu_seqlens, **keywords)
        found = linear(out.flatten(1), self.out_proj.weight, self.out_proj.bias)
        return _nested_as(found, rows)


def _refuse_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, need_weights: bool
) -> None:
    """Nested tensors come without masks and weights."""
    for name, came in (
        ("key_padding_mask", None if key_padding_mask is None else "a mask"),
        ("attn_mask", None if attn_mask is None else "a mask"),
        ("need_weights", "True" if need_weights else None),
    ):
        if came is not None:
            fix = "A nested tensor has its own lengths; is_causal=True says the causal mask."
            raise InvalidArgument(name, f"{came} with nested tensors", "none", fix)


def _by_heads(x: Tensor, heads: int) -> Tensor:
    """[.., H * D] -> [.., H, D], a view."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


@cache
def _warn_of_weights() -> None:
    """Say once per process what weights cost."""
    message = (
        "tilewise.nn.MultiheadAttention was called with need_weights=True, which is the default: "
        "the weights of all pairs are written, by plain torch operations in O(L S) memory. Where "
        "they are not used, pass need_weights=False (or set drop_weights=True on the module): "
        "then the call runs in the kernel."
    )
    warnings.warn(message, SlowPathWarning, stacklevel=6)


class _Sizes(NamedTuple):
    """The sizes of a call; ``added`` keys come behind its S own."""

    batch: int
    heads: int
    queries: int
    keys: int
    added: int


class _Masks(NamedTuple):
    """What hides pairs, and what is added to scores."""

    mask: Mask | None
    score: Score | None


def _check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    module: torch.nn.MultiheadAttention,
) -> _Sizes:
    batched = query.dim() == 3
    form = "[S, E]"
    if batched:
        form = "[B, S, E]" if module.batch_first else "[S, B, E]"
    widths = (module.embed_dim, module.kdim, module.vdim)
    named = (("query", query), ("key", key), ("value", value))
    for (name, x), width in zip(named, widths, strict=True):
        if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
            required = f"{form} with {width} features"
            if x is not query:
                required += ", of as many dimensions as query has"
            raise InvalidArgument(name, f"shape {list(x.shape)}", required)
    if key.shape[:-1] != value.shape[:-1]:
        required = f"that of key but for the features, {list(key.shape[:-1])}"
        raise InvalidArgument("value", f"shape {list(value.shape)}", required)
    at = 1 if batched and module.batch_first else 0  # of the sequence; the batch is the other one
    batch = query.shape[1 - at] if batched else 1
    if batched and key.shape[1 - at] != batch:
        came = f"shape {list(key.shape)}, {form}"
        raise InvalidArgument("key", came, f"the batch of query, {batch}")
    added = int(module.bias_k is not None) + int(module.add_zero_attn)
    sizes = _Sizes(batch, module.num_heads, query.shape[at], key.shape[at], added)
    _check_padding(key_padding_mask, sizes, batched)
    _check_pairs(attn_mask, sizes)
    return sizes


def _said_by(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, sizes: _Sizes
) -> _Masks:
    """Return what the masks of a call say; ``_check_shapes`` has seen them.

    ``attn_mask`` [B * H, L, S] may have one of all heads [L, S]; with ``is_causal`` it counts only
    for its gradient.
    """
    hidden: list[Mask] = []
    added: list[Score] = []
    if is_causal and (attn_mask is None or not attn_mask.requires_grad):
        hidden.append(_causal(sizes))
    elif attn_mask is not None:
        by_heads = attn_mask
        if attn_mask.dim() == 3:
            by_heads = attn_mask.view(sizes.batch, sizes.heads, *attn_mask.shape[1:])
        _sort(by_heads, sizes, hidden, added)
    if key_padding_mask is not None:
        rows = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
        _sort(rows[:, None, None], sizes, hidden, added)
    mask = None
    for each in hidden:
        mask = each if mask is None else mask & each
    return _Masks(mask, as_score(added) if added else None)


def _sort(tensor: Tensor, sizes: _Sizes, hidden: list[Mask], added: list[Score]) -> None:
    """Put a mask among those that hide or those that are added."""
    found = tensor if tensor.dtype is torch.bool else _as_bool(tensor)
    whole = tensor if found is None else found
    if sizes.added:
        whole = pad(whole, (0, sizes.added))
    if found is None:
        added.append(scores.bias(whole))
    else:
        hidden.append(Mask(_HIDDEN, (whole,)))


def _as_bool(tensor: Tensor) -> Tensor | None:
    """Where a float mask hides, if hiding is all that it does; None if it is not, or not known.

    Containers of torch make such masks of bool ones. Kernels skip what a bool mask hides. A look
    at the values is worth it where heads share them, and where it stops no device.
    """
    small = tensor.dim() == 2 or tensor.shape[1] == 1
    if not small or tensor.requires_grad or tensor.device.type != "cpu":
        return None
    if torch.compiler.is_compiling():
        return None
    found = tensor == -math.inf
    return found if bool((found | (tensor == 0)).all()) else None


def _causal(sizes: _Sizes) -> Mask:
    """Query m sees keys 0 to m, and those that are added."""
    if not sizes.added:
        return _CAUSAL
    own = sizes.keys
    return masks.function(lambda b, h, m, n: (n <= m) | (n >= own))


def _check_padding(mask: Tensor | None, sizes: _Sizes, batched: bool) -> None:
    if mask is None:
        return
    _check_kind("key_padding_mask", mask)
    wanted = (sizes.batch, sizes.keys) if batched else (sizes.keys,)
    if tuple(mask.shape) != wanted:
        required = f"[B, S], {list(wanted)}" if batched else f"[S], {list(wanted)}"
        raise InvalidArgument("key_padding_mask", f"shape {list(mask.shape)}", required)


def _check_pairs(mask: Tensor | None, sizes: _Sizes) -> None:
    if mask is None:
        return
    _check_kind("attn_mask", mask)
    pairs = (sizes.queries, sizes.keys)
    every = (sizes.batch * sizes.heads, *pairs)
    if tuple(mask.shape) not in (pairs, every):
        required = f"[L, S], {list(pairs)}, or [B * H, L, S], {list(every)}"
        raise InvalidArgument("attn_mask", f"shape {list(mask.shape)}", required)


def _check_kind(name: str, mask: Tensor) -> None:
    check_tensor(name, mask, _KIND)
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise InvalidArgument(name, f"a tensor of {mask.dtype}", _KIND)
