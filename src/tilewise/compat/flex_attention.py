"""``flex_attention`` and ``create_block_mask`` by torch's signatures, over ``tilewise.attention``.

    from tilewise.compat.flex_attention import create_block_mask, flex_attention

replaces the import from ``torch.nn.attention.flex_attention``. A ``score_mod`` and a ``mask_mod``
are traced into the expressions of ``docs/variants.md`` and run inside the kernel, in the blocks of
the block mask. They run eager and compiled, also on the CPU, with a backward everywhere. A function
outside that language is refused by name; nothing is computed in another way instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    create_mask,
    noop_mask,
)

from tilewise.checks import check_tensor, named
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.functional import attention
from tilewise.sparse import BlockMask as OwnBlockMask
from tilewise.sparse.flex import read, write
from tilewise.torch_private import constant_while_compiling
from tilewise.variants import masks, patterns, scores
from tilewise.variants.guidance import not_expressed
from tilewise.variants.values import Mask, Score, as_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

_OPTIONS = frozenset(FlexKernelOptions.__annotations__)
_V = TypeVar("_V", Mask, Score)
_WHOLE = 1 << 30  # torch's size of the one block of a mask that is made where none is given
_EVERYTHING = masks.window(None, None)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Torch's ``flex_attention``: softmax(score_mod(scale query key^T)) value in present blocks.

    A row that sees no key gives 0, with lse and largest score -inf. Tensors that a ``score_mod``
    indexes have gradients. Indices below 0 do not wrap around, as torch's do. Under torch.compile
    the lists of a BlockMask are read inside the graph.

    Args:
        query: [B, Hq, L, E].
        key: [B, Hk, S, E]; of one batch item for all where a block mask has those of query.
        value: [B, Hk, S, Ev].
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, called once, with values that write
            down what is done with them.
        block_mask: torch's BlockMask for these L and S (its ``mask_mod`` is traced, its lists say
            which blocks are there); a slice of one, ``block_mask[:, :, i]``, that has the blocks of
            L rows, its ``mask_mod`` set anew; the empty one, for any lengths; or a
            ``tilewise.BlockMask``.
        scale: 1/sqrt(E) if None.
        enable_gqa: Hq may be a multiple of Hk; without it they are equal.
        return_lse: ask for (output, lse).
        kernel_options: hints for torch's kernels, by their names: read, and of no effect here.
        return_aux: ask for (output, AuxOutput): the logsumexp, with gradient, and the largest
            score of each row, without; both [B, Hq, L].

    Returns:
        [B, Hq, L, Ev], alone or with what was asked for.

    Raises:
        InvalidArgument, InvalidType: ValueError and TypeError, naming the argument that is wrong.
        Unsupported: a function is not in the language of scores and masks; return_aux asks for
            something else; or no backend can.

    Source: Dong et al., "Flex Attention", 2024; torch.nn.attention.flex_attention.
    """
    _check(query, key, value, enable_gqa)
    _check_options(kernel_options)
    _check_request(return_aux)
    if return_lse and return_aux is not None:
        raise InvalidArgument("return_lse", "True beside return_aux", "one of the two")
    key, value = _with_batch(query, key, value, block_mask)
    mask = None
    if block_mask is not None:
        said = _check_lengths(block_mask, query, key)
        keys = None if said else key.shape[2]
        mask = _mask_of(block_mask, query.shape[2], keys, (query.shape[0], query.shape[1]))
    found = attention(
        query,
        key,
        value,
        mask=mask,
        score=None if score_mod is None else _expressed("score_mod", score_mod, scores.function),
        scale=scale,
        return_lse=True,
        return_stats=return_aux is not None and return_aux.max_scores,
    )
    if return_aux is not None:
        largest = found.stats.max_logit if return_aux.max_scores else None
        return found.out, AuxOutput(found.lse if return_aux.lse else None, largest)
    return (found.out, found.lse) if return_lse else found.out


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Torch's BlockMask of a ``mask_mod(b, h, q_idx, kv_idx) -> bool``, in O(blocks) memory.

    Intervals prove most blocks empty or full; pairs are looked at in the others only. The result is
    torch's own, for torch's ``flex_attention`` and for this one.

    Args:
        mask_mod: in the language of ``tilewise.masks.function``.
        B: batch items with a table each; None for one that serves all.
        H: query heads with a table each; None for one that serves all.
        Q_LEN: L.
        KV_LEN: S.
        device: where the lists are; the accelerator, else the CPU, if None.
        BLOCK_SIZE: of queries and keys, or of both.
        _compile: of no effect: there is nothing to compile.
        separate_full_blocks: False lists full blocks among the others.
        compute_dq_write_order: True is refused: the metadata of another backward.
        dq_kv_order: of no effect without it.

    Raises:
        Unsupported: ``mask_mod`` is not in the language; torch.compile traces; or
            compute_dq_write_order.
    """
    if compute_dq_write_order:
        fix = "leave it False: the backward here is deterministic without it"
        raise Unsupported("create_block_mask with compute_dq_write_order", fix=fix)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    batch, heads = B or 1, H or 1
    mask = _read_mod(mask_mod)
    found = OwnBlockMask.of(mask, Q_LEN, KV_LEN, batch=batch, heads=heads, block=block)
    covers = found.covers.to(device).expand(batch, heads, -1, -1)
    if not separate_full_blocks:
        covers = covers.clamp(max=1)
    made: BlockMask = write(mask, covers, block, Q_LEN, KV_LEN, given=mask_mod)
    if all(tensor.device == covers.device for tensor in mask.captured):
        _keep(made, _state(made, mask, Q_LEN), found.to(device))
    return made


def and_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``mask_mod`` of the pairs that all of them let attend.

    Raises:
        InvalidType: one is no function.
    """
    return _joined(mask_mods, both=True)


def or_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``mask_mod`` of the pairs that one of them at least lets attend.

    Raises:
        InvalidType: one is no function.
    """
    return _joined(mask_mods, both=False)


def _joined(mask_mods: tuple[Callable[..., Any], ...], both: bool) -> Callable[..., Any]:
    for index, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            came = f"a {type(mask_mod).__name__}"
            raise InvalidType(f"mask_mods[{index}]", came, "a function (b, h, q_idx, kv_idx)")

    def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        found: Any = q_idx >= 0 if both else q_idx < 0
        for mask_mod in mask_mods:
            one = mask_mod(b, h, q_idx, kv_idx)
            found = found & one if both else found | one
        return found

    return joined


def _check(query: Any, key: Any, value: Any, grouped: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if check_tensor(name, tensor, "a tensor [B, H, S, E]").is_nested:
            fix = "tilewise.attention takes nested tensors."
            raise InvalidArgument(name, "a nested tensor", "a dense one [B, H, S, E]", fix)
        check_tensor(name, tensor, "[B, H, S, E]", dims=4)
    if not grouped and query.shape[1] != key.shape[1]:
        raise InvalidArgument(
            "key",
            f"{key.shape[1]} heads for {query.shape[1]} of query",
            "as many as query has",
            "Say enable_gqa=True for grouped queries.",
        )


def _check_options(kernel_options: Mapping[str, Any] | None) -> None:
    for name in kernel_options or ():
        if name.removeprefix("fwd_").removeprefix("bwd_") not in _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            raise InvalidArgument("kernel_options", repr(name), f"one of torch's: {known}")


def _check_request(return_aux: AuxRequest | None) -> None:
    """Refuse what a later torch may let a request ask for."""
    if return_aux is None:
        return
    if not isinstance(return_aux, AuxRequest):
        raise InvalidType("return_aux", named(return_aux), "an AuxRequest, or None")
    for name, wanted in return_aux._asdict().items():
        if wanted and name not in ("lse", "max_scores"):
            fix = "call torch.nn.attention.flex_attention for it"
            raise Unsupported(f"return_aux with {name}", fix=fix)


def _with_batch(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any
) -> tuple[Tensor, Tensor]:
    """Key and value of one batch item for each of query's, where a block mask says so."""
    batch = query.shape[0]
    if key.shape[0] == batch or block_mask is None or key.shape[0] != 1:
        return key, value  # where they differ, attention says so
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def _check_lengths(block_mask: Any, query: Tensor, key: Tensor) -> bool:
    """Refuse a block mask of torch's for other lengths; a slice has the blocks of these rows.

    Return whether it says how many keys there are: not where torch's ``_adjust`` rounded them up.
    """
    if isinstance(block_mask, OwnBlockMask) or not isinstance(block_mask, BlockMask):
        return True
    if _is_everything(block_mask):
        return True
    rows, keys = block_mask.shape[-2:]
    queries, block, listed = query.shape[2], block_mask.BLOCK_SIZE[0], block_mask.kv_num_blocks
    needed, there = -(-queries // block), listed.shape[-1]
    is_slice = there < -(-rows // block)
    fits = there == needed if is_slice else rows == queries
    if fits and keys == key.shape[2]:
        return True
    if _is_adjusted(block_mask, queries, key.shape[2]):
        return False
    made_for = f"a slice of {there} blocks of {block} queries" if is_slice else f"{rows} queries"
    raise InvalidArgument(
        "block_mask",
        f"one for {made_for} and {keys} keys",
        f"one for {queries} queries and {key.shape[2]} keys",
        "Make a new one with create_block_mask; or crop it to its first rows and keys with "
        "block_mask._adjust(q_len, kv_len); or, to decode, slice it: mask = block_mask[:, :, i], "
        "set mask.mask_mod to the whole mask's, with the rows counted from the slice's first, and "
        "mask.seq_lengths to (rows of query, keys).",
    )


class _State(NamedTuple):
    """What a block mask is read from."""

    text: str
    sizes: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def versions(self) -> tuple[int, ...]:
        """Return what changes when a tensor is changed in place."""
        return tuple([x._version for x in self.tensors])


class _Kept(NamedTuple):
    """A block mask read."""

    state: _State
    versions: tuple[int, ...]
    found: OwnBlockMask


_KEPT: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
_FORGETS: list[bool] = []


def _is_everything(block_mask: Any) -> bool:
    """Return whether a torch's block mask is of one block for any lengths, as None makes one."""
    return all(size == _WHOLE for size in block_mask.BLOCK_SIZE)


def _is_adjusted(block_mask: Any, queries: int, keys: int) -> bool:
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
        made = BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=2)
        _FORGETS.append(made._adjust(1, 1).shape[-1] != 1)
    return _FORGETS[0]


def _mask_of(block_mask: Any, queries: int, keys: int | None, many: tuple[int, int]) -> Mask:
    """Return a block mask's mask, torch's or ours, for ``queries``; ``keys`` if not its own.

    ``many`` are B and Hq: a ``mask_mod`` may tell apart what one list of blocks serves.

    A block mask of torch's is read again when its ``mask_mod`` has become another function, its
    lengths have changed, a tensor was changed, or it was read for another B or Hq and tells them
    apart. Otherwise the earlier reading is used.
    """
    if isinstance(block_mask, OwnBlockMask):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        required = "a BlockMask of torch.nn.attention.flex_attention or of tilewise"
        fix = "Make it with create_block_mask(mask_mod, ...)."
        raise InvalidType("block_mask", f"a {type(block_mask).__name__}", required, fix)
    if _is_everything(block_mask):
        return _read_mod(block_mask.mask_mod)
    if torch.compiler.is_compiling():
        return _in_graph(block_mask, queries, keys)
    held = _KEPT.get(block_mask)
    now = _state(block_mask, _read_mod(block_mask.mask_mod), queries, keys)
    if held is not None and _same(held, now) and _is_for(held.found, many):
        return held.found
    found = OwnBlockMask.from_flex(block_mask, queries, keys, batch=many[0], heads=many[1])
    _keep(block_mask, now, found)
    return found


def _is_for(found: OwnBlockMask, many: tuple[int, int]) -> bool:
    """Return whether a table is for B batch items and Hq heads: 0 in it says any number."""
    made_for = found.program[-1].params[2:4]
    return all(own in (0, each) for own, each in zip(made_for, many, strict=True))


def _in_graph(block_mask: Any, queries: int, keys: int | None) -> Mask:
    """The mask of a block mask while torch.compile traces: its lists are read inside the graph."""
    given = read(block_mask, queries, keys)
    partial, full = (patterns.layout(given.covers == cover, given.block) for cover in (1, 2))
    mask = _EVERYTHING if given.mask is None else _read_mod(given.mask)
    return (mask & partial) | full


def _read_mod(mask_mod: Any) -> Mask:
    if mask_mod is None or mask_mod is noop_mask:
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


def _state(block_mask: Any, mask: Mask, queries: int, keys: int | None = None) -> _State:
    lists = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    rows, columns = block_mask.shape[-2:]
    sizes = (queries, rows, columns if keys is None else keys, *block_mask.BLOCK_SIZE)
    return _State(mask.text, sizes, (*mask.captured, *(x for x in lists if x is not None)))


def _keep(block_mask: Any, state: _State, found: OwnBlockMask) -> None:
    if not any(tensor.is_inference() for tensor in state.tensors):  # they do not tell of changes
        _KEPT[block_mask] = _Kept(state, state.versions, found)


def _same(held: _Kept, now: _State) -> bool:
    before = held.state
    return (
        before[:2] == now[:2]
        and list(map(id, before.tensors)) == list(map(id, now.tensors))
        and held.versions == now.versions
    )
