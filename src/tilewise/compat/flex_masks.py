"""FlexAttention's functions and block masks as masks and scores of tilewise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.sparse.block_mask import BlockMask
from tilewise.sparse.flex import read, write
from tilewise.torch_private import constant_while_compiling
from tilewise.variants import masks, patterns, scores
from tilewise.variants.guidance import not_expressed
from tilewise.variants.values import Mask, Score, as_mask

__all__ = ["created", "is_adjusted", "is_everything", "mask_of", "score_of"]

_V = TypeVar("_V", Mask, Score)
_WHOLE = 1 << 30  # torch's size of the one block of a mask that is made where none is given
_EVERYTHING = masks.window(None, None)


class _Kept(NamedTuple):
    """A block mask read, and what it was read from."""

    text: str
    sizes: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    found: BlockMask


_KEPT: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
_FORGETS: list[bool] = []


def score_of(score_mod: Callable[..., Any]) -> Score:
    """Return the score of a ``score_mod(score, b, h, q_idx, kv_idx)``.

    Raises:
        Unsupported: it is not in the language of scores.
    """
    return _expressed("score_mod", score_mod, scores.function)


def is_everything(block_mask: Any) -> bool:
    """Return whether a torch's block mask is of one block for any lengths, as None makes one."""
    return all(size == _WHOLE for size in block_mask.BLOCK_SIZE)


def is_adjusted(block_mask: Any, queries: int, keys: int) -> bool:
    """Return whether this torch's ``_adjust(queries, keys)`` gives this block mask's lengths.

    If ``_adjust`` forgets the lengths that it was given, they are those of whole blocks.
    """
    across, along = block_mask.BLOCK_SIZE
    whole = (-(-queries // across) * across, -(-keys // along) * along)
    return tuple(block_mask.shape[-2:]) == whole and _adjust_forgets()


@constant_while_compiling
def _adjust_forgets() -> bool:
    """Return whether ``_adjust`` rounds lengths up to whole blocks, as that of torch 2.11."""
    if not _FORGETS:
        one = torch.ones(1, 1, 1, dtype=torch.int32, device="cpu")
        made = flex.BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=2)
        _FORGETS.append(made._adjust(1, 1).shape[-1] != 1)
    return _FORGETS[0]


def mask_of(block_mask: Any, queries: int, keys: int | None = None) -> Mask:
    """Return a block mask's mask, torch's or ours, for ``queries``; ``keys`` if not its own.

    A block mask of torch's is read again when its ``mask_mod`` has become another function, its
    lengths have changed, or a tensor was changed. Otherwise the earlier reading is used.

    Raises:
        InvalidType: it is neither.
        Unsupported: its ``mask_mod`` is not in the language of masks.
    """
    if isinstance(block_mask, BlockMask):
        return block_mask
    if not isinstance(block_mask, flex.BlockMask):
        required = "a BlockMask of torch.nn.attention.flex_attention or of tilewise"
        fix = "Make it with create_block_mask(mask_mod, ...)."
        raise InvalidType("block_mask", f"a {type(block_mask).__name__}", required, fix)
    if is_everything(block_mask):
        return _read_mod(block_mask.mask_mod)
    if torch.compiler.is_compiling():
        return _in_graph(block_mask, queries, keys)
    held = _KEPT.get(block_mask)
    now = _state(block_mask, _read_mod(block_mask.mask_mod), queries, keys)
    if held is not None and _same(held, *now):
        return held.found
    found = BlockMask.from_flex(block_mask, queries, keys)
    _keep(block_mask, now, found)
    return found


def created(
    mask_mod: Callable[..., Any],
    sizes: tuple[int | None, int | None, int, int],
    device: Any,
    block: tuple[int, int],
    full_apart: bool,
) -> Any:
    """Torch's BlockMask of a ``mask_mod``, without a mask of M x N on the way.

    Raises:
        Unsupported: ``mask_mod`` is not in the language of masks.
    """
    batch, heads, queries, keys = sizes
    mask = _read_mod(mask_mod)
    batch, heads = batch or 1, heads or 1
    found = BlockMask.of(mask, queries, keys, batch=batch, heads=heads, block=block)
    covers = found.covers.to(device)
    covers = covers.expand(batch, heads, -1, -1)
    if not full_apart:
        covers = covers.clamp(max=1)
    made = write(mask, covers, block, queries, keys, given=mask_mod)
    if all(tensor.device == covers.device for tensor in mask.captured):
        _keep(made, _state(made, mask, queries), found.to(device))
    return made


def _in_graph(block_mask: Any, queries: int, keys: int | None) -> Mask:
    """The mask of a block mask while torch.compile traces: its lists are read inside the graph."""
    given = read(block_mask, queries, keys)
    partial, full = (patterns.layout(given.covers == cover, given.block) for cover in (1, 2))
    mask = _EVERYTHING if given.mask is None else _read_mod(given.mask)
    return (mask & partial) | full


def _read_mod(mask_mod: Any) -> Mask:
    if mask_mod is None or mask_mod is flex.noop_mask:
        return _EVERYTHING
    if isinstance(mask_mod, Mask):
        return mask_mod
    return _expressed("mask_mod", mask_mod, as_mask)


def _expressed(kind: str, function: Any, reading: Callable[[Any], _V]) -> _V:
    if torch.compiler.is_compiling():  # its own error then says where the function is
        return reading(function)
    try:
        return reading(function)
    except (InvalidArgument, InvalidType, AttributeError, TypeError) as error:
        instead = "call torch.nn.attention.flex_attention for it, which runs any function"
        raise not_expressed(kind, function, error, instead) from error


_State: TypeAlias = tuple[str, tuple[int, ...], tuple[Tensor, ...]]


def _state(block_mask: Any, mask: Mask, queries: int, keys: int | None = None) -> _State:
    lists = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    rows, columns = block_mask.shape[-2:]
    sizes = (queries, rows, columns if keys is None else keys, *block_mask.BLOCK_SIZE)
    return mask.text, sizes, (*mask.captured, *(x for x in lists if x is not None))


def _keep(block_mask: Any, state: _State, found: BlockMask) -> None:
    text, sizes, tensors = state
    if not any(tensor.is_inference() for tensor in tensors):  # they do not tell of changes
        versions = tuple([x._version for x in tensors])
        _KEPT[block_mask] = _Kept(text, sizes, tensors, versions, found)


def _same(held: _Kept, text: str, sizes: tuple[int, ...], tensors: tuple[Tensor, ...]) -> bool:
    return (
        held.text == text
        and held.sizes == sizes
        and len(held.tensors) == len(tensors)
        and all(one is other for one, other in zip(held.tensors, tensors, strict=True))
        and held.versions == tuple([x._version for x in tensors])
    )
