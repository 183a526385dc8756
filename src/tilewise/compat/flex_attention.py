"""``flex_attention`` and ``create_block_mask`` by torch's signatures, over ``tilewise.attention``.

    from tilewise.compat.flex_attention import create_block_mask, flex_attention

replaces the import from ``torch.nn.attention.flex_attention``. A ``score_mod`` and a ``mask_mod``
are traced into the expressions of ``docs/variants.md`` and run inside the kernel, in the blocks of
the block mask. They run eager and compiled, also on the CPU, with a backward everywhere. A function
outside that language is refused by name; nothing is computed in another way instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
from tilewise.compat.flex_masks import created, is_adjusted, is_everything, mask_of, score_of
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.functional import attention
from tilewise.sparse.block_mask import BlockMask as OwnBlockMask

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
        mask = mask_of(block_mask, query.shape[2], None if said else key.shape[2])
    found = attention(
        query,
        key,
        value,
        mask=mask,
        score=None if score_mod is None else score_of(score_mod),
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
    rows, keys = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    sizes = (B, H, Q_LEN, KV_LEN)
    made: BlockMask = created(mask_mod, sizes, device, (rows, keys), separate_full_blocks)
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
    """A block mask of torch's is for these lengths, or a slice with the blocks of these rows.

    Returns:
        Whether it says how many keys there are: not where torch's ``_adjust`` rounded them up.
    """
    if isinstance(block_mask, OwnBlockMask) or not isinstance(block_mask, BlockMask):
        return True
    if is_everything(block_mask):
        return True
    rows, keys = block_mask.shape[-2:]
    queries, block, listed = query.shape[2], block_mask.BLOCK_SIZE[0], block_mask.kv_num_blocks
    needed, there = -(-queries // block), listed.shape[-1]
    is_slice = there < -(-rows // block)
    fits = there == needed if is_slice else rows == queries
    if fits and keys == key.shape[2]:
        return True
    if is_adjusted(block_mask, queries, key.shape[2]):
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
