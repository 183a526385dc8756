"""Which calls give a row the same bits: prompts in pieces, and sequences in other company.

Keys are cut into blocks at every multiple of 128, but a rest of fewer than 64 at the end joins the
block before it. That, and whether there are more than 8 queries, is all that a row's bits know.
With matrix tiles, in bfloat16, they also know whether heads share keys, and more than 8 queries
have blocks of 64 keys where heads are no wider than 64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tilewise import masks
from tilewise.serving import KVCache, PagedKVCache

HEADS, KV_HEADS, WIDTH = 4, 2, 16
shared_or_not = pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])


def drawn(heads: int, rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, rows, WIDTH, generator=generator).to(dtype)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


def block_keys(dtype: torch.dtype) -> int:
    """Keys of a block where there are more than 8 queries."""
    core = pytest.importorskip("tilewise._core")
    return 64 if dtype == torch.bfloat16 and core.isa_active() == "avx512_amx" else 128


def cuts(keys: int, row: int, block: int = 128) -> list[int]:
    """Where the keys that a row sees are cut in a call of so many keys."""
    blocks = max(1, (keys + block // 2) // block)
    return [block * i for i in range(1, blocks) if block * i <= row]


def in_pieces(kind: str, q: Tensor, k: Tensor, v: Tensor, ends: list[int]) -> Tensor:
    """The output of a prompt that is appended and attended in pieces."""
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": WIDTH, "dtype": q.dtype}
    pieces, start = [], 0
    rows = KVCache(batch=1, capacity=q.shape[2], **sizes)
    pages = PagedKVCache(pages=40, page_size=48, **sizes)
    sequence = pages.add()
    for end in ends:
        part = slice(start, end)
        if kind == "rows":
            rows.append(k[:, :, part], v[:, :, part])
            pieces.append(rows.attend(q[:, :, part]))
        else:
            pages.append([sequence], k[:, :, part], v[:, :, part])
            pieces.append(pages.attend([sequence], q[:, :, part]))
        start = end
    return torch.cat(pieces, 2)


@pytest.mark.parametrize("kind", ["rows", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("piece", [64, 100, 192, 37, 9])
@pytest.mark.parametrize("length", [512, 690])
def test_prompts_in_pieces(length: int, piece: int, dtype: torch.dtype, kind: str) -> None:
    """The bits of one piece wherever the keys are cut as in one piece."""
    q, k, v = (drawn(h, length, s, dtype) for s, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    whole = tilewise.attention(q, k, v, mask=masks.causal())
    ends = list(range(piece, length, piece))
    if length - (ends[-1] if ends else 0) <= 8:
        del ends[-1]  # another kernel would have the last few
    ends.append(length)
    found = in_pieces(kind, q, k, v, ends)
    own_end = [end for start, end in zip([0, *ends], ends, strict=False) for _ in range(start, end)]
    block = block_keys(dtype)
    equal = [
        row for row in range(length) if cuts(own_end[row], row, block) == cuts(length, row, block)
    ]
    assert len(equal) == length or piece % 64
    assert len(equal) > length // 2
    assert_same_bits(found[:, :, equal], whole[:, :, equal], "rows")
    torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-2)


@shared_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_queries_are_as_many_single_ones(dtype: torch.dtype, kv_heads: int) -> None:
    """What speculative decoding asks for: up to 8 at once, or one by one."""
    length = 330
    q, k, v = (drawn(h, length, s, dtype) for s, h in enumerate((HEADS, kv_heads, kv_heads)))

    def few(end: int, rows: int) -> Tensor:
        keys = k[:, :, :end], v[:, :, :end]
        return tilewise.attention(q[:, :, end - rows : end], *keys, mask=masks.causal())

    compared = 0
    for end in range(120, length, 11):
        together = few(end, 8)
        for i in range(8):
            row = end - 8 + i
            if cuts(end, row) == cuts(row + 1, row):
                compared += 1
                assert_same_bits(together[:, :, i : i + 1], few(row + 1, 1), f"row {row}")
    assert compared > 120


LENGTHS = (1, 63, 64, 129, 700, 2200, 511, 17)


@shared_or_not
@pytest.mark.parametrize("queries", [1, 5, 8, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_company_in_pages(queries: int, dtype: torch.dtype, kv_heads: int, threads: int) -> None:
    """A sequence alone, with others, in another order: the same bits."""
    cache = PagedKVCache(pages=300, page_size=16, kv_heads=kv_heads, head_dim=WIDTH, dtype=dtype)
    chosen = [cache.add() for _ in LENGTHS]
    for i, (sequence, length) in enumerate(zip(chosen, LENGTHS, strict=True)):
        more = length + queries - 1
        k, v = drawn(kv_heads, more, i, dtype), drawn(kv_heads, more, 50 + i, dtype)
        cache.append([sequence], k, v)
    q = torch.cat([drawn(HEADS, queries, 90 + i, dtype) for i in range(len(LENGTHS))])
    together = cache.attend(chosen, q, return_lse=True)
    order = [5, 2, 7]
    some = cache.attend([chosen[i] for i in order], q[order], return_lse=True)
    assert_same_bits(some.out, together.out[order], "out of some")
    assert_same_bits(some.lse, together.lse[order], "lse of some")
    packed = q.transpose(1, 2).flatten(0, 1)
    starts = torch.arange(len(LENGTHS) + 1) * queries
    out = cache.attend(chosen, packed, cu_seqlens_q=starts)
    assert_same_bits(out, together.out.transpose(1, 2).flatten(0, 1), "packed")
    torch.set_num_threads(2)
    for i, sequence in enumerate(chosen):
        alone = cache.attend([sequence], q[i : i + 1])
        assert_same_bits(alone, together.out[i : i + 1], f"sequence {i}")
