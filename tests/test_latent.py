"""Latent attention (MLA): keys of 576 whose first 512 are the values, and its naive form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.cases import drawn
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.targets import CPU_TARGETS, Target, forced
from tests.plain import attend
from tilewise import masks

WIDTH, VALUES = 576, 512  # of DeepSeek-V2 and V3: 512 that are compressed, 64 with positions
SCALE = 192**-0.5  # of the heads before absorption


@pytest.mark.parametrize("target", CPU_TARGETS, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_are_a_part_of_the_keys(
    target: Target, dtype: torch.dtype, queries: int
) -> None:
    """The absorbed form, decoding and prefill: a view is enough, and the 2x rule holds."""
    q = (0.3 * drawn(1, 8, queries, WIDTH)).to(dtype)
    latent = drawn(1, 1, 70, WIDTH, seed=1).to(dtype)
    with forced(target):
        got = tilewise.attention(
            q, latent, latent[..., :VALUES], mask=masks.causal(), scale=SCALE, backend="cpu"
        )

    def plain(q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        def seen(b: Any, h: Any, m: Any, n: Any) -> Any:
            return n <= m + 70 - queries

        return attend(q, latent, latent[..., :VALUES], mask=seen, scale=SCALE).out

    assert_exact(got, plain(q, latent), plain(q.double(), latent.double()), "out")


def test_a_cache_of_latent_pages() -> None:
    """Values are a view of the pages too: the same bits as without pages."""
    q, latent = 0.3 * drawn(2, 4, 1, WIDTH), drawn(2, 1, 48, WIDTH, seed=1)
    table = torch.tensor([[4, 0, 2], [1, 5, 3]])
    pages = torch.empty(6, 1, 16, WIDTH)
    pages[table.flatten(), 0] = latent.view(6, 16, WIDTH)
    lengths = torch.tensor([48, 48])
    got = tilewise.attention_paged(
        q, pages, pages[..., :VALUES], table, lengths, scale=SCALE, backend="cpu"
    )
    due = tilewise.attention(q, latent, latent[..., :VALUES], scale=SCALE, backend="cpu")
    assert_same_bits(got, due, "out")


def test_listed_latents() -> None:
    """The heads of a layer with an indexer read the listed latents alone, forward and backward."""
    q = (0.3 * drawn(1, 4, 6, WIDTH)).requires_grad_()
    latent = drawn(1, 1, 40, WIDTH, seed=1).requires_grad_()
    lists = torch.randint(-1, 40, (1, 1, 6, 9), generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(1, 1, 6, 41, dtype=torch.bool)
    seen = seen.scatter(-1, torch.where(lists < 0, 40, lists), True)[..., :40]
    found = []
    for keys, mask in ((lists, None), (None, seen)):
        values = latent[..., :VALUES]
        out = tilewise.attention(q, latent, values, keys=keys, mask=mask, scale=SCALE)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, latent))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
