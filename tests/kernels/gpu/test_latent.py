"""Queries and keys wider than 512 on the GPU backend: the absorbed form of latent attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import drawn
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.gpu.passes import forward
from tilelab.cases.case import Case
from tilelab.cases.inputs import build, problem_of
from tilewise import masks
from tilewise.errors import Unsupported
from tilewise.kernels.gpu.config import FAMILIES, Blocks, Parts, holds, shared_need, tiles_for
from tilewise.variants.float8 import FLOAT8

KEYS, HEADS, SCALE = 70, 3, 192**-0.5


def given(queries: int, width: int = 576, values: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, latent keys, and values that are a view of them."""
    latent = drawn(1, 1, KEYS, width, seed=1)
    return 0.3 * drawn(1, HEADS, queries, width), latent, latent[..., :values]


@pytest.mark.parametrize(
    ("queries", "width", "values"),
    [(1, 576, 512), (33, 576, 512), (33, 520, 512), (1, 513, 40), (33, 576, 100)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_absorbed_form(dtype: torch.dtype, queries: int, width: int, values: int) -> None:
    """Decoding and prefill, output and statistics; values in place have the bits of a copy."""
    q, k, v = (x.to(dtype) for x in given(queries, width, values))
    v = k[..., :values]
    called: dict[str, Any] = {"mask": masks.causal(), "scale": SCALE, "return_stats": True}

    def call(backend: str, to: torch.dtype, v: Tensor) -> dict[str, Tensor]:
        own = (q.to(to), k.to(to), v if v.dtype == to else v.to(to))
        out, lse, stats = tilewise.attention(*own, **called, return_lse=True, backend=backend)
        return {"out": out, "lse": lse, "entropy": stats.entropy}

    got, copied = call("gpu", dtype, v), call("gpu", dtype, v.contiguous())
    plain, oracle = call("tiled", dtype, v), call("tiled", torch.float64, v)
    for name, tensor in got.items():
        assert_exact(tensor, plain[name], oracle[name], name)
        assert_same_bits(copied[name], tensor, name)


def test_pages_and_key_lists() -> None:
    """A latent cache in pages has the bits of one without; lists read the keys that they name."""
    q, k, v = given(2)
    out = tilewise.attention(q, k, v, scale=SCALE, mask=masks.causal(), backend="gpu")
    table = torch.tensor([[4, 0, 2, 1, 3]])
    pages = torch.full((5, 1, 16, 576), torch.nan)
    for slot, page in enumerate(table[0].tolist()):
        rows = k[0, 0, slot * 16 : (slot + 1) * 16]
        pages[page, 0, : len(rows)] = rows
    paged: dict[str, Any] = {"scale": SCALE, "mask": masks.causal(), "backend": "gpu"}
    lengths = torch.tensor([KEYS])
    got = tilewise.attention_paged(q, pages, pages[..., :512], table, lengths, **paged)
    assert_same_bits(got, out, "pages")
    lists = torch.randint(0, KEYS, (1, 1, 2, 20), generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(1, 1, 2, KEYS, dtype=torch.bool).scatter(-1, lists, True)
    got = tilewise.attention(q, k, v, keys=lists, scale=SCALE, backend="gpu")
    plain, oracle = (
        tilewise.attention(*(x.to(to) for x in (q, k, v)), mask=seen, scale=SCALE, backend="tiled")
        for to in (torch.float32, torch.float64)
    )
    assert_exact(got, plain, oracle, "lists")


def test_products_in_parts() -> None:
    """Prefill where registers do not hold whole rows: of all columns, the tail's among them."""
    case = Case("parts", heads=2, kv_heads=1, queries=33, head_dim=576, value_dim=512)
    problem, operands = problem_of(build(case).detached())
    parts = Parts(128, 64, 64, 32, 32)
    got = forward(problem, operands, Blocks(16, 16, 4, 1), parts=parts)
    whole = forward(problem, operands, Blocks(16, 16, 4, 1))
    torch.testing.assert_close(got.out, whole.out, rtol=1e-5, atol=1e-6)


def test_what_is_not_there() -> None:
    """Gradients and float8, each with its reason."""
    q, k, v = given(3)
    for leaves in ((q.requires_grad_(), k, v), (q.detach(), k.requires_grad_(), v)):
        with pytest.raises(Unsupported, match="no gradients of D = 576: they end at 512"):
            tilewise.attention(*leaves, backend="gpu")
    lists = torch.zeros(1, 1, 3, 2, dtype=torch.int32)
    with pytest.raises(Unsupported, match="no gradients of D = 576"):
        tilewise.attention(q.detach(), k, v, keys=lists, backend="gpu")
    eight = [x.detach().to(FLOAT8) for x in (q, k, v)]
    with pytest.raises(Unsupported, match="D = 576 is over its limit of 512"):
        tilewise.attention(*eight, backend="gpu")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "interpreter"])
def test_blocks_fit_every_chip(family: str) -> None:
    """16 bits fit everywhere; float32 where a program may have 104 KiB, else it is declined."""
    assert holds(family, torch.bfloat16, 576, 512)
    room = FAMILIES[family].shared_bytes
    assert holds(family, torch.float32, 576, 512) == (room >= 104 * 1024)
    for name in ("forward", "decode"):
        blocks = tiles_for(family, name, torch.bfloat16, 576, 512, False)
        assert shared_need(name, blocks, 2, 576, 512) <= room
