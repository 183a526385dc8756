"""Turn the masks of transformers into expressions, without writing a queries x keys tensor.

transformers describes a mask in two parts. The first is a function ``(batch, head, q, kv) -> bool``
over positions, which it composes from causal, window, chunk and packing functions. The second is a
tensor [B, positions] that marks what is no padding. The function is traced
(``tilewise.masks.function``), so a user's own ``or_mask_function`` goes the same way. Padding on
the right becomes lengths.

Values of a tensor are read on the CPU only, and not while something traces. Elsewhere a read would
stall the device, break a graph, or hold for one call alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.functional import visible_pairs
from tilewise.routes import elsewhere
from tilewise.variants import masks
from tilewise.variants.guidance import not_expressed
from tilewise.variants.program import Program
from tilewise.variants.values import Mask

MaskFunction = Callable[..., Any]


# These models read the model's mask to make others of it: layers by an indexer or a gate, the
# decoder of T5Gemma 2 by appending the encoder's, routers of NLLB-MoE and convolutions of LASR to
# leave out padding. They get it written out, as eager has it: M x N numbers.
_EXTEND_TENSORS = (
    "qwen4_exp_text", "deepseek_v4", "doge", "t5gemma2_decoder", "nllb-moe", "lasr_encoder",
)  # fmt: skip
# Configs of models whose indexers choose by tiles (indexers.py): by identity, as they can be equal.
_BY_TILES: WeakValueDictionary[int, Any] = WeakValueDictionary()
# "eager" is what every model has; about 25 old ones have no "sdpa".
_INSTEAD = (
    "this model looks into its mask, or computes attention by its own code: "
    "use attn_implementation='eager' for it, or 'sdpa' if it has that"
)
_ALL = slice(None)
_OF_INDEXERS = ((_ALL, 0), (_ALL, 0, _ALL, _ALL))


class Pairs:
    """The pairs that attend, which a model carries where other implementations have a tensor.

    Models ask it for what says that it is no padding mask (``ndim``, ``shape``), and generate for
    a contiguous one.

    Args:
        mask: over the queries and the first ``keys`` keys; None for every pair of them.
        shape: (B, 1, M, N), as of the tensor that it stands for.
        keys: how many of the N keys a query may see: fewer in a static cache that is not full.
        device: where it is.
        chosen: [B, M, K], the keys that a query reads of those that the mask shows, -1 for none;
            None for all.
    """

    __slots__ = ("by_tiles", "chosen", "device", "keys", "mask", "prefixes", "shape")

    ndim = 4

    def __init__(
        self,
        mask: Mask | None,
        shape: tuple[int, int, int, int],
        keys: int,
        device: torch.device | str = "cpu",
        chosen: Tensor | None = None,
    ) -> None:
        self.mask, self.shape, self.keys, self.device = mask, shape, keys, device
        self.chosen = chosen
        self.prefixes: Any = None  # what pools.py finds out, for all layers
        self.by_tiles = False  # whether indexers take it as it is

    def __repr__(self) -> str:
        return f"Pairs({self.mask!r}, shape={self.shape}, keys={self.keys})"

    def contiguous(self) -> Pairs:
        """Itself: there is no memory to lay out."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "dtype" and self.by_tiles:
            return torch.bool
        raise AttributeError(
            f"a mask of attn_implementation='tilewise' is an expression and no tensor: it has no "
            f".{name}\n  fix: {_INSTEAD}"
        )

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        """Refuse to be an operand of torch, as in ``scores + mask`` of a model's own attention."""
        name = getattr(function, "__name__", function)
        raise Unsupported(f"{name} of a mask, which is an expression and no tensor", fix=_INSTEAD)

    def __getitem__(self, index: object) -> Any:
        """Write out the pairs, bool [B, M, N], for ``[:, 0]`` or ``[:, 0, :, :]``.

        An indexer asks for them, which writes a score for each of them anyway; or it chooses by
        tiles, and gets an object.
        """
        if index in _OF_INDEXERS and self.by_tiles:
            return Shown(self)
        if index in _OF_INDEXERS:
            batch, _, queries, keys = self.shape
            seen = visible_pairs(self.mask, queries, self.keys, batch=batch, device=self.device)
            return torch.nn.functional.pad(seen[:, 0], (0, keys - self.keys))
        raise Unsupported(
            f"the index {index} of a mask, which is an expression and no tensor",
            fix=_INSTEAD,
        )


class Shown:
    """The pairs as indexers have them that choose by tiles: what they ask a boolean tensor for."""

    dtype = torch.bool

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def __invert__(self) -> Hidden:
        return Hidden(self.pairs)


class Chosen(NamedTuple):
    """The keys [B, M, K] that an indexer chose, in the place of a boolean tensor; -1 for none."""

    keys: Tensor

    def __rand__(self, mask: Pairs | Tensor) -> Pairs:
        """Return the pairs that attend by a boolean mask and by this choice."""
        if isinstance(mask, Pairs):
            return Pairs(mask.mask, mask.shape, mask.keys, mask.device, self.keys)
        batch, _, queries, keys = mask.shape
        given = masks.dense(mask)
        return Pairs(given, (batch, 1, queries, keys), keys, mask.device, self.keys)


class Hidden(NamedTuple):
    """The other pairs."""

    pairs: Pairs


def by_tiles(config: Any, switch: bool) -> None:
    """Note whether the indexers of the model with a config choose by tiles."""
    if switch:
        _BY_TILES[id(config)] = config
    else:
        _BY_TILES.pop(id(config), None)


def _causal(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = _causal,
    attention_mask: Tensor | Pairs | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Pairs:
    """The mask function of ``AttentionMaskInterface``: query q_offset + m sees key kv_offset + n.

    Args:
        batch_size: B, batch items.
        q_length: M, query rows.
        kv_length: N, of a static cache its whole size.
        q_offset: the position of the first query. A tensor of one element is read, as its cache
            will change it; but not while something traces.
        kv_offset: the position of the first key.
        mask_function: ``(batch, head, q, kv) -> bool`` over positions.
        attention_mask: [B, positions], True or not 0 for what is no padding; or a result of this
            function, which is given back: generate makes masks before the forward does.
        device: of the model.
        _: what transformers says for other implementations.

    Returns:
        An object for the attention function, which the model only carries there.

    Raises:
        InvalidArgument: attention_mask is no tensor [B, positions].
        Unsupported: ``mask_function`` is not in the language of masks.
    """
    if isinstance(attention_mask, Pairs):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    sizes = (q_length, kv_length)
    if isinstance(q_offset, Tensor) and is_traced(q_offset):
        # A copy: it is the length of a static cache, which counts on in place before layers attend.
        mask, keys = _from_the_start(mask_function, q_offset.clone(), kv_offset), kv_length
    else:
        mask, keys = _over_positions(mask_function, *sizes, int(q_offset), kv_offset)
    if elsewhere():
        _refuse_rows(mask, attention_mask)
        return Pairs(mask if mask.program else None, shape, keys, device)
    padding = None if attention_mask is None else _padding(attention_mask, kv_offset, keys)
    if padding is not None:
        mask = mask & padding
    return Pairs(mask if mask.program else None, shape, keys, device)


def mask_of_model(
    *sizes: Any, dtype: torch.dtype = torch.float32, config: Any = None, **rest: Any
) -> Pairs | Tensor:
    """Return what ``make_mask`` returns, written out where layers of the model need a tensor.

    That is [B, 1, M, N] of ``dtype``, which is added to scores: 0 for pairs that attend, else its
    least number. ``config`` is the model's; the rest is what ``make_mask`` takes.
    """
    made = make_mask(*sizes, **rest)
    if not torch.compiler.is_compiling():  # dynamo knows no weak references
        made.by_tiles = _BY_TILES.get(id(config)) is config is not None
    if made.by_tiles or getattr(config, "model_type", None) not in _EXTEND_TENSORS:
        return made
    hidden = ~made[:, 0]
    added = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return added.masked_fill(hidden, torch.finfo(dtype).min)[:, None]


def _refuse_rows(mask: Mask, attention_mask: Tensor | None) -> None:
    """Refuse a mask that speaks of the rows of one process, where several share a sequence."""
    if mask.captured:
        raise Unsupported(
            "a mask with tensors for the rows of one process, where several share a sequence "
            "(transformers takes positions that are not consecutive for packed sequences)",
            fix="pass attention_mask=torch.ones_like(input_ids), or take schedule='ring'",
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise Unsupported(
            "padding in a sequence that several processes share",
            fix="pack sequences without padding, or pad with tokens whose loss does not count",
        )


def _over_positions(
    function: MaskFunction, queries: int, keys: int, q_offset: int, kv_offset: int
) -> tuple[Mask, int]:
    """Return the mask over rows and keys that count from 0, and how many keys it is for.

    The last query is mostly at the last key. In a static cache it is before the last key, and a
    causal mask hides the rest. In both cases the offset is written as N - M, and the same program
    serves every step.
    """
    last = q_offset - kv_offset + queries
    if 0 < last <= keys:
        trace = _kept if _is_constant(function) else _from_the_end
        found = trace(function, bool(q_offset), kv_offset)
        if last == keys or _hides_the_future(found.program):
            return found, last
    return _from_the_start(function, q_offset, kv_offset), keys


def _from_the_start(function: MaskFunction, q_offset: int | Tensor, kv_offset: int) -> Mask:
    def positioned(b: Any, h: Any, m: Any, n: Any) -> Any:
        return function(b, h, m + q_offset, n + kv_offset)

    return _traced(positioned, function)


def _from_the_end(function: MaskFunction, shifted: bool, kv_offset: int) -> Mask:
    def positioned(b: Any, h: Any, m: Any, n: Any) -> Any:
        own = m + (n.length - m.length) + kv_offset if shifted else m
        return function(b, h, own, n + kv_offset)

    return _traced(positioned, function)


_kept = lru_cache(maxsize=16)(_from_the_end)


def _is_constant(function: MaskFunction) -> bool:
    """Return whether a mask function is one of transformers that says the same in every forward."""
    return (
        not torch.compiler.is_compiling()  # first: dynamo knows no closure of a function of its own
        and getattr(function, "__module__", "") == "transformers.masking_utils"
        and getattr(function, "__closure__", ()) is None
    )


def _hides_the_future(program: Program) -> bool:
    """Return whether no row sees a later key: all masks must allow a pair, and one is causal."""
    return all(instr.op not in ("or", "not") for instr in program) and any(
        instr.op == "band" and instr.params[1] == 0 for instr in program
    )


def _traced(positioned: MaskFunction, function: MaskFunction) -> Mask:
    try:
        return masks.function(positioned)
    except (InvalidArgument, InvalidType, AttributeError, TypeError) as error:
        instead = "use attn_implementation='sdpa' for this model"
        raise not_expressed("the mask function", function, error, instead) from error


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tensor's values cannot be read, or would hold for one call alone."""
    jit: Any = torch.jit
    return torch.compiler.is_compiling() or jit.is_tracing() or type(tensor) is not Tensor


def _padding(real: Tensor, first: int, keys: int) -> Mask | None:
    """Return the keys that are no padding; None where all are seen to be real."""
    if real.dim() != 2:
        raise InvalidArgument("attention_mask", f"shape {tuple(real.shape)}", "[B, positions]")
    real = real[:, first : first + keys].bool()
    if real.shape[1] < keys:  # of a static cache, what is not yet there
        real = torch.nn.functional.pad(real, (0, keys - real.shape[1]))
    if not real.is_cpu or is_traced(real):
        # One expression for every length and side. Kernels leave out what lies behind the last key.
        places = torch.arange(1, keys + 1, device=real.device)
        last = (real * places).amax(-1) if keys else real.sum(-1)
        return masks.lengths(last) & masks.dense(real[:, None, None, :])
    on_the_right = (real[:, :-1] | ~real[:, 1:]).all()
    every, right = torch.stack((real.all(), on_the_right)).tolist()
    if every:
        return None
    return masks.lengths(real.sum(-1)) if right else masks.dense(real[:, None, None, :])
