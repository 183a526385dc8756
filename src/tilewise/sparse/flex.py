"""FlexAttention's BlockMask read and written."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.reference.expressions import evaluate
from tilewise.variants import expr as expressions
from tilewise.variants.lower import Extent, lower_mask
from tilewise.variants.masks import function
from tilewise.variants.program import EXPR, Instr
from tilewise.variants.values import Mask

_OURS = "_tilewise_mask"  # the attribute of a mask_mod of ours: its mask, and M and N that it has


class Given(NamedTuple):
    """Contents of a BlockMask of FlexAttention."""

    covers: Tensor  # uint8 [B|1, Hq|1, rows, columns]: 0 left out, 1 asks ``mask_mod``, 2 all pairs
    # The ``mask_mod``, or the mask that it was made of; None where it says nothing.
    mask: Mask | Callable[..., Any] | None
    block: tuple[int, int]  # queries and keys of a block
    # Both: M and N.
    queries: int
    keys: int


def read(block_mask: Any, queries: int | None = None, keys: int | None = None) -> Given:
    """Return what a BlockMask of FlexAttention says.

    Its lists may have more rows and name more columns than its lengths have: code that crops a
    mask sets its ``seq_lengths`` alone. A slice, ``block_mask[:, :, i]``, has fewer rows than its
    lengths say.

    ``queries`` and ``keys`` are M and N of the call; what the mask says if None, or as many rows as
    a slice has.

    Raises:
        InvalidType: it is none.
        InvalidArgument: it has fewer keys.
    """
    if not isinstance(block_mask, flex_attention.BlockMask):
        required = "a torch.nn.attention.flex_attention.BlockMask"
        raise InvalidType("block_mask", f"a {type(block_mask).__name__}", required)
    own, own_keys = block_mask.shape[-2:]
    if keys is None:
        keys = own_keys
    elif keys > own_keys:
        raise InvalidArgument("keys", str(keys), f"no more than the {own_keys} of block_mask")
    block = (int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1]))
    if queries is None:
        queries = min(own, block_mask.kv_num_blocks.shape[-1] * block[0])
    columns = -(-keys // block[1])
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, 1)]
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if full[0] is not None and full[1] is not None:
        lists.append((full[0], full[1], 2))
    counts = lists[0][0]
    covers = torch.zeros(*counts.shape, columns, dtype=torch.uint8, device=counts.device)
    for numbers, indices, cover in lists:
        named = torch.arange(indices.shape[-1], device=counts.device) < numbers[..., None]
        named &= indices < columns
        # What a list does not name goes to a column that is cut off.
        places = torch.where(named, indices.to(torch.int64), columns)
        wide = torch.nn.functional.pad(covers, (0, 1))
        covers = wide.scatter(-1, places, cover)[..., :columns]
    while covers.dim() < 4:
        covers = covers[None]
    covers = covers[:, :, : -(-queries // block[0])]
    given: Any = block_mask.mask_mod
    if given is flex_attention.noop_mask:
        given = None
    made = getattr(given, _OURS, None)
    mask = given if made is None else _as_made(made, int(queries), int(keys))
    return Given(covers.contiguous(), mask, block, int(queries), int(keys))


def _as_made(made: tuple[Mask, int, int], queries: int, keys: int) -> Mask:
    """A mask with its own lengths written down, where it is to be one of other lengths.

    As torch crops a mask: each pair is seen or not as before.
    """
    mask, own_queries, own_keys = made
    if (own_queries, own_keys) == (queries, keys):
        return mask
    lengths = {"M": own_queries, "N": own_keys}
    program: list[Instr] = []
    for instr in mask.program:
        if instr.op == "band" and instr.params[2]:
            left, right = (int(value) for value in instr.params[:2])
            program += function(_band(left, right, own_keys - own_queries)).program
        elif instr.op == EXPR:
            expr = expressions.decode(str(instr.params[0]))
            nodes = [
                expressions.Node("const_int", (), lengths[node.op]) if node.op in lengths else node
                for node in expr.nodes
            ]
            text = expressions.encode(expressions.Expr(tuple(nodes), expr.outputs))
            program.append(Instr(EXPR, (text,), instr.slots))
        else:
            program.append(instr)
    return Mask(tuple(program), mask.captured)


def _band(left: int, right: int, offset: int) -> Callable[..., Any]:
    """The function of a band around the keys ``m + offset``; -1 for an open side."""

    def seen(b: Any, h: Any, m: Any, n: Any) -> Any:
        found = n >= (m + (offset - left) if left >= 0 else 0)
        return found & (n <= m + (offset + right)) if right >= 0 else found

    return seen


def write(
    mask: Mask,
    covers: Tensor,
    block: tuple[int, int],
    queries: int,
    keys: int,
    given: Callable[..., Any] | None = None,
) -> Any:
    """The BlockMask of FlexAttention with this table, whose ``mask_mod`` is the mask or ``given``.

    As there, a block that reaches past M or N is not called full.
    """
    covers = covers.clone()
    if queries % block[0]:
        covers[:, :, -1].clamp_(max=1)
    if keys % block[1]:
        covers[..., -1].clamp_(max=1)
    partial, full = (_listed(covers == cover) for cover in (1, 2))
    return flex_attention.BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=block,
        mask_mod=mask_mod(mask, queries, keys) if given is None else given,
        seq_lengths=(queries, keys),
    )


def _listed(named: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row names, and which, those first."""
    order = torch.argsort(named.to(torch.int32), dim=-1, descending=True, stable=True)
    return named.sum(-1, dtype=torch.int32), order.to(torch.int32)


def mask_mod(mask: Mask, queries: int, keys: int) -> Callable[..., Tensor]:
    """The mask as a function ``(b, h, m, n) -> bool`` of integer tensors, for M x N pairs."""
    program, tensors = mask.program, mask.captured

    def says(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        stack: list[Tensor] = []
        for instr in program:
            if instr.op == "not":
                stack.append(~stack.pop())
            elif instr.op in ("and", "or"):
                second, first = stack.pop(), stack.pop()
                stack.append(first & second if instr.op == "and" else first | second)
            elif instr.op != "tiles":
                loads = [tensors[slot] for slot in instr.slots]
                stack.append(_leaf(instr, loads, (b, h, m, n), (queries, keys)))
        return stack.pop()

    setattr(says, _OURS, (mask, queries, keys))
    return says


def _leaf(
    instr: Instr, loads: list[Tensor], pair: tuple[Tensor, ...], lengths: tuple[int, int]
) -> Tensor:
    """Return what an operation that takes no other says of pairs."""
    (b, h, m, n), (queries, keys) = pair, lengths
    if instr.op == "band":
        left, right, anchor = (int(value) for value in instr.params)
        own = m + (keys - queries if anchor else 0)
        seen = torch.ones_like(m + n, dtype=torch.bool)
        seen = seen & (n >= own - left) if left >= 0 else seen
        return seen & (n <= own + right) if right >= 0 else seen
    if instr.op == EXPR:
        expr = expressions.decode(str(instr.params[0]))
        keywords: dict[str, Any] = {"b": b, "h": h, "m": m, "n": n, "loads": loads}
        keywords |= {"s": None, "queries": queries, "keys": keys, "dtype": torch.float32}
        return evaluate(expr, **keywords)[0]
    if instr.op == "below":
        return n < (loads[0][b] if loads else int(instr.params[0]))
    if instr.op == "same_document":
        ids_q, ids_k = (x if x.dim() == 2 else x[None] for x in loads)
        return ids_q[_at(b, ids_q, 0), m] == ids_k[_at(b, ids_k, 0), n]
    (held,) = loads
    if instr.op == "blocks":
        across, along = (int(value) for value in instr.params)
        m, n = m // across, n // along
    elif instr.params:
        extent = Extent(0, 0, queries, keys, ragged=True, check_values=False)
        (held,) = lower_mask((instr._replace(slots=(0,)),), (held,), extent, held.device)
    else:
        held = held.reshape((1,) * (4 - held.dim()) + held.shape)
    return held[_at(b, held, 0), _at(h, held, 1), _at(m, held, 2), _at(n, held, 3)]


def _at(index: Tensor, tensor: Tensor, dim: int) -> Tensor:
    """Return an index, or the first where a dimension broadcasts."""
    return index if tensor.shape[dim] > 1 else torch.zeros_like(index)
