"""Decoding over a cache that processes keep in parts gives what one process gives.

Protects ``split_cache_attention``: keys in one piece and in pages, every variant of the catalogue,
processes without keys, the same bits on all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tilewise
from tests.cases import drawn
from tests.contract import assert_same_bits
from tests.distributed.calls import NAMES, names
from tests.distributed.ranks import Ranks
from tests.paged import in_pages
from tests.variants.calls import Call, Sizes
from tilewise import masks
from tilewise.distributed import split_cache_attention
from tilewise.errors import InvalidArgument, Unsupported

COUNTS = ([53, 0, 0], [0, 20, 33], [1, 30, 22])  # keys of each process
LENGTHS = ([20, 0, 7], [0, 0, 9], [11, 3, 0])  # of each sequence, for each process


def one_piece(group: dist.ProcessGroup, name: str, counts: list[int], rows: int) -> Any:
    call = Call(NAMES[name], torch.float64, Sizes(queries=rows, keys=sum(counts)))
    rank = dist.get_rank(group)
    at = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    q, k, v = (x.detach() for x in call.qkv)
    keywords = call.keywords(None)
    with torch.no_grad():
        return split_cache_attention(q, k[:, :, at], v[:, :, at], mesh=group, **keywords)[:2]


@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@names
def test_keys_in_one_piece(ranks: Ranks, name: str, counts: list[int], rows: int) -> None:
    call = Call(NAMES[name], torch.float64, Sizes(queries=rows, keys=sum(counts)))
    expected = tilewise.attention(*call.qkv, **call.keywords(None))
    found = ranks.run(one_piece, name, counts, rows, count=3)
    for answer in found:
        for got, due, first in zip(answer, expected[:2], found[0], strict=True):
            torch.testing.assert_close(got, due.detach(), rtol=1e-9, atol=1e-9)
            assert_same_bits(got, first, "the first process's")


def paged_call(name: str, rows: int) -> tuple[Tensor, list[Tensor], list[Tensor], dict[str, Any]]:
    """Queries, and the keys and values of each sequence, with keywords."""
    totals = [sum(each) for each in zip(*LENGTHS, strict=True)]
    made = NAMES[name].make(Sizes(len(totals), 4, rows, max(totals)), torch.float64)
    keys, values = (
        [drawn(2, n, 8, seed=seed + n, dtype=torch.float64) for n in totals] for seed in (1, 2)
    )
    sinks = drawn(4, seed=5, dtype=torch.float64) if NAMES[name].sinks else None
    q = drawn(len(totals), 4, rows, 8, seed=3, dtype=torch.float64)
    return q, keys, values, {"mask": made.mask, "score": made.score, "sinks": sinks}


def in_parts(group: dist.ProcessGroup, name: str, rows: int) -> Any:
    q, keys, values, keywords = paged_call(name, rows)
    rank = dist.get_rank(group)
    own: list[list[Tensor]] = []
    for kept in (keys, values):
        starts = [sum(each[b] for each in LENGTHS[:rank]) for b in range(len(kept))]
        own.append([x[:, s : s + n] for x, s, n in zip(kept, starts, LENGTHS[rank], strict=True)])
    k, v, table, lengths = in_pages(own[0], own[1], 4)
    with torch.no_grad():
        found = split_cache_attention(
            q, k, v, table, lengths, mesh=group, return_lse=True, **keywords
        )
    return found[:2]


@pytest.mark.parametrize("rows", [1, 5])
@names
def test_keys_in_pages(ranks: Ranks, name: str, rows: int) -> None:
    q, keys, values, keywords = paged_call(name, rows)
    with torch.no_grad():
        expected = tilewise.attention_paged(
            q, *in_pages(keys, values, 4), return_lse=True, **keywords
        )
    for answer in ranks.run(in_parts, name, rows, count=3):
        for got, due in zip(answer, expected[:2], strict=True):
            torch.testing.assert_close(got, due.detach(), rtol=1e-9, atol=1e-9)


def refusals(group: dist.ProcessGroup) -> None:
    q = torch.ones(1, 2, 1, 4)
    with pytest.raises(Unsupported, match="gradients"):
        split_cache_attention(q.clone().requires_grad_(), q, q, mesh=group)
    with pytest.raises(InvalidArgument, match="block_table"):
        split_cache_attention(q, q, q, key_lengths=torch.tensor([1]), mesh=group)
    with pytest.raises(InvalidArgument, match="cu_seqlens_q"):
        split_cache_attention(q, q, q, cu_seqlens_q=torch.tensor([0, 1]), mesh=group)
    odd = dist.get_rank(group) == 1
    with pytest.raises(InvalidArgument, match="the same call"):
        split_cache_attention(q, q, q, mesh=group, mask=masks.window(2 + odd, 0))
    with pytest.raises(InvalidArgument, match="the same call"):
        split_cache_attention(q, q, q, mesh=group, sinks=torch.ones(2) if odd else None)
    pages, more = torch.ones(3, 2, 4, 4), 1 + odd
    table, lengths = torch.zeros(more, 1, dtype=torch.int32), torch.ones(more, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="the same call"):
        split_cache_attention(q.expand(more, 2, 1, 4), pages, pages, table, lengths, mesh=group)


def test_refusals(ranks: Ranks) -> None:
    ranks.run(refusals, count=2)
