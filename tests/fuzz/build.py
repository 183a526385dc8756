"""The tensors of a case and its call by the public interface."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise
from tests.fuzz.case import PLAIN, Case, Layout, Table
from tests.fuzz.memory import Heap, lay
from tests.paged import Paged, in_pages
from tilewise import masks, scores

LANGUAGE: dict[str, Any] = {
    "masks": masks,
    "scores": scores,
    "torch": torch,
    "where": tilewise.where,
    "minimum": tilewise.minimum,
    "maximum": tilewise.maximum,
}


@dataclass
class Call:
    """The tensors of a case; ``leaves`` are those whose gradient is wanted, by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: list[Tensor]
    sinks: Tensor | None
    starts: tuple[Tensor, Tensor] | None
    pages: Paged | None
    lists: Tensor | None
    seed: int
    grad_out: Tensor
    grad_lse: Tensor
    grad_entropy: Tensor
    leaves: dict[str, Tensor]

    def operands(self) -> dict[str, Tensor]:
        """Every tensor that the call reads, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        found |= {f"t{i}": table for i, table in enumerate(self.tables)}
        if self.sinks is not None:
            found["sinks"] = self.sinks
        if self.pages is not None:
            found |= {"k_pages": self.pages.k_pages, "v_pages": self.pages.v_pages}
        if self.lists is not None:
            found["lists"] = self.lists
        return found


class _Draw:
    """Numbers of a case by the name of their tensor: another tensor's size does not change them."""

    def __init__(self, case: Case, heap: Heap) -> None:
        self.case, self.heap = case, heap

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.case.values} {name}".encode()))

    def normal(
        self, name: str, sizes: tuple[int, ...], gain: float, dtype: torch.dtype, layout: Layout
    ) -> Tensor:
        values = torch.randn(sizes, generator=self.generator(name), dtype=torch.float64) * gain
        return lay(values, dtype, layout, self.heap)

    def table(self, name: str, table: Table, dtype: torch.dtype) -> Tensor:
        generator = self.generator(name)
        draw = torch.rand(table.sizes, generator=generator, dtype=torch.float64)
        if table.kind == "bool":
            return lay((draw < 0.6).double(), torch.bool, table.layout, self.heap)
        if table.kind == "int":
            values = torch.floor(table.low + (table.high + 1 - table.low) * draw)
            if table.how == "sorted" and values.dim():
                values = values.sort(dim=-1).values
            return lay(values, torch.int64, table.layout, self.heap)
        values = table.low + (table.high - table.low) * draw
        if table.how == "holes":
            values[torch.rand(table.sizes, generator=generator) < 1 / 3] = -torch.inf
        if table.wide and dtype != torch.float64:
            dtype = torch.float32
        return lay(values, dtype, table.layout, self.heap)

    def lists(self) -> Tensor:
        """Of each row: places in any order, some of them none (-1), some more than once."""
        case = self.case
        places = -(-case.keys // case.list_block)
        sizes = case.batch, 1 if case.lists_shared else case.kv_heads, case.queries, case.listed
        drawn = torch.randint(-1, places, sizes, generator=self.generator("lists"))
        kind = torch.int32 if case.values % 2 else torch.int64
        return lay(drawn.double(), kind, PLAIN, self.heap)


def seen(case: Case, lists: Tensor) -> Tensor:
    """Whether a list of its row has a key: [B, Hq, M, N]."""
    batch, heads, rows, _ = lists.shape
    places = -(-case.keys // case.list_block)
    found = torch.zeros(batch, heads, rows, places + 1, dtype=torch.bool)
    found.scatter_(-1, torch.where(lists < 0, places, lists).long(), value=True)
    keys = found[..., :places].repeat_interleave(case.list_block, -1)[..., : case.keys]
    return keys.repeat_interleave(case.heads // heads, 1)


def dtype_of(case: Case) -> torch.dtype:
    """The dtype of q, k and v."""
    found = getattr(torch, case.dtype)
    assert isinstance(found, torch.dtype)
    return found


def build(case: Case, heap: Heap | None = None) -> Call:
    """The tensors of a case, the same every time."""
    heap = Heap() if heap is None else heap
    draw, dtype = _Draw(case, heap), dtype_of(case)
    q_layout, k_layout, v_layout, grad_layout = case.layouts
    heads, kv_heads, lead = case.heads, case.kv_heads, (case.batch,)
    rows, keys = case.queries, case.keys
    starts = None
    if case.sequences is not None:
        lengths = torch.tensor(case.sequences, dtype=torch.int64).reshape(-1, 2)
        ends = torch.nn.functional.pad(lengths.cumsum(0), (0, 0, 1, 0))
        kind = torch.int32 if case.values % 2 else torch.int64
        first, second = (lay(ends[:, i].double(), kind, PLAIN, heap) for i in (0, 1))
        starts = first, second
        rows, keys = int(ends[-1, 0]), int(ends[-1, 1])

    def sizes(count: int, length: int, width: int) -> tuple[int, ...]:
        packed = (length, count, width)
        return packed if starts is not None else (*lead, count, length, width)

    q = draw.normal("q", sizes(heads, rows, case.head_dim), case.gain, dtype, q_layout)
    k = draw.normal("k", sizes(kv_heads, keys, case.head_dim), case.gain, dtype, k_layout)
    v = draw.normal("v", sizes(kv_heads, keys, case.value_dim), 1.0, dtype, v_layout)
    tables = [draw.table(f"t{i}", table, dtype) for i, table in enumerate(case.tables)]
    narrow = torch.float64 if dtype == torch.float64 else torch.float32
    sinks = draw.normal("sinks", (heads,), 1.0, narrow, PLAIN) if case.sinks else None
    wanted = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    leaves = {name: wanted[name].requires_grad_() for name in case.grads if name in wanted}
    for i, table in enumerate(case.tables):
        if table.grad:
            leaves[f"t{i}"] = tables[i].requires_grad_()
    of_rows = (heads, rows) if starts is not None else (*lead, heads, rows)
    out_sizes = sizes(heads, rows, case.value_dim)
    grad_out = draw.normal("grad_out", out_sizes, 1.0, dtype, grad_layout)
    grad_lse = draw.normal("grad_lse", of_rows, 1.0, narrow, PLAIN)
    grad_entropy = draw.normal("grad_entropy", of_rows, 1.0, narrow, PLAIN)
    pages = None
    if case.page_size and starts is not None and case.sequences:
        pages = _paged(case, k, v, starts[1], heap)
    lists = draw.lists() if case.listed else None
    seed = case.values * 2654435761 % 2**63
    return Call(
        q, k, v, tables, sinks, starts, pages, lists, seed, grad_out, grad_lse, grad_entropy, leaves
    )


def _paged(case: Case, k: Tensor, v: Tensor, starts: Tensor, heap: Heap) -> Paged:
    ends = starts.tolist()
    spans = [slice(*ends[i : i + 2]) for i in range(len(ends) - 1)]
    keys, values = ([x[span].transpose(0, 1) for span in spans] for x in (k, v))
    made = in_pages(keys, values, case.page_size, case.values, 1, case.values % 3 == 0)
    order = (1, 0, 2) if case.values % 3 == 0 else ()
    pools = [
        lay(pool.double(), pool.dtype, Layout(order), heap) for pool in (made.k_pages, made.v_pages)
    ]
    counts = lay(made.key_lengths.double(), torch.int32, PLAIN, heap)
    return Paged(pools[0], pools[1], lay_int(made.block_table, heap), counts)


def lay_int(values: Tensor, heap: Heap) -> Tensor:
    """The same integers in memory of the heap."""
    flat = heap.flat(values.numel(), values.dtype)
    flat.copy_(values.reshape(-1))
    return flat.view(values.shape)


def keywords(case: Case, call: Call) -> dict[str, Any]:
    """The keywords of the public call."""
    names = {**LANGUAGE, **{f"t{i}": table for i, table in enumerate(call.tables)}}
    found: dict[str, Any] = {"scale": case.scale, "sinks": call.sinks, "backend": "cpu"}
    if case.mask is not None:
        found["mask"] = eval(case.mask.source(), names)
    if case.scores:
        found["score"] = [eval(node.source(), names) for node in case.scores]
    if case.dropout_p:
        found |= {"dropout_p": case.dropout_p, "seed": call.seed}
    return found


def attend(case: Case, call: Call, more: dict[str, Any]) -> Any:
    """What the public call returns."""
    given = {**keywords(case, call), **more}
    if call.pages is not None:
        assert call.starts is not None
        return tilewise.attention_paged(call.q, *call.pages, call.starts[0], **given)
    if call.starts is not None:
        return tilewise.attention_varlen(call.q, call.k, call.v, *call.starts, **given)
    if call.lists is not None:
        given["keys"] = call.lists
        if case.list_block > 1:
            given["keys"] = tilewise.KeyBlocks(call.lists, case.list_block)
    return tilewise.attention(call.q, call.k, call.v, **given)


def run(case: Case, call: Call) -> dict[str, Tensor]:
    """Every output of the public call, and the gradients that are wanted, by name."""
    stats = "top1" if case.stats == "top1" else bool(case.stats)
    with torch.set_grad_enabled(case.differentiated):
        out, lse, rows = attend(case, call, {"return_lse": True, "return_stats": stats})
    found = {"out": out.detach(), "lse": lse.detach()}
    outputs, sent = [out], [call.grad_out]
    if rows is not None:
        found |= {"max_logit": rows.max_logit.detach(), "entropy": rows.entropy.detach()}
        if rows.top1 is not None:
            found["top1"] = rows.top1
    if case.lse_grad:
        outputs, sent = [*outputs, lse], [*sent, call.grad_lse]
    if case.entropy_grad and rows is not None:
        outputs, sent = [*outputs, rows.entropy], [*sent, call.grad_entropy]
    pairs = list(zip(outputs, sent, strict=True))
    return found | differentiate(case, pairs, call.leaves)


def differentiate(
    case: Case, pairs: list[tuple[Tensor, Tensor]], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient of each leaf, by name, and where the case asks for it the second derivative.

    Args:
        case: says whether the gradients are differentiated again, along a fixed direction.
        pairs: outputs and the gradients that are sent into them.
        leaves: what is differentiated.
    """
    kept = [(output, sent) for output, sent in pairs if output.requires_grad]
    if not leaves:
        return {}
    grads = _gradients(
        [x for x, _ in kept], list(leaves.values()), [g for _, g in kept], case.second
    )
    found = {f"grad of {name}": grad.detach() for name, grad in zip(leaves, grads, strict=True)}
    if case.second:
        again = [grad for grad in grads if grad.requires_grad]
        along = [_direction(grad) for grad in again]
        second = _gradients(again, list(leaves.values()), along, False)
        found |= {f"second of {name}": grad for name, grad in zip(leaves, second, strict=True)}
    return found


def _direction(like: Tensor) -> Tensor:
    """The same numbers for every dtype: multiples of 1/4 that all of them hold."""
    places = torch.arange(like.numel()) * 7919 % 17 - 8
    return (places / 4).to(like.dtype).view(like.shape)


def _gradients(
    outputs: list[Tensor], leaves: list[Tensor], sent: list[Tensor], again: bool
) -> list[Tensor]:
    """Zeros where nothing leads to a leaf."""
    if not outputs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(outputs, leaves, sent, allow_unused=True, create_graph=again)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
