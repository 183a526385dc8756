"""The cache in one piece, and prompts that are taken in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tilewise import masks
from tilewise.errors import InvalidArgument
from tilewise.serving import KVCache


def drawn(seed: int, heads: int, rows: int) -> Tensor:
    return torch.randn(2, heads, rows, 16, generator=torch.Generator().manual_seed(seed))


def test_what_is_kept_and_what_is_asked_for() -> None:
    cache = KVCache(batch=2, kv_heads=2, head_dim=16, capacity=50)
    k, v, q = drawn(1, 2, 40), drawn(2, 2, 40), drawn(3, 4, 1)
    cache.append(k.requires_grad_(), v)
    assert not cache.keys.requires_grad
    assert_same_bits(cache.values, v, "values")
    got = cache.attend(q, mask=masks.window(8, 0), return_lse=True)
    expected = tilewise.attention(q, k.detach(), v, mask=masks.window(8, 0), return_lse=True)
    assert_same_bits(got.out, expected.out, "out")
    assert_same_bits(got.lse, expected.lse, "lse")
    cache.truncate(7)
    assert_same_bits(cache.keys, k.detach()[:, :, :7], "keys")
    cache.append(k[:, :, 7:40], v[:, :, 7:40])
    assert_same_bits(cache.keys, k.detach(), "keys again")


def test_what_does_not_fit() -> None:
    cache = KVCache(batch=2, kv_heads=2, head_dim=16, capacity=50)
    cache.append(drawn(1, 2, 40), drawn(2, 2, 40))
    with pytest.raises(InvalidArgument, match=r"^k: got 11 keys behind 40; .*capacity of 50"):
        cache.append(drawn(1, 2, 11), drawn(2, 2, 11))
    with pytest.raises(InvalidArgument, match=r"^length: got 41; required: in \[0, 40\]"):
        cache.truncate(41)
    with pytest.raises(InvalidArgument, match=r"^k: got shape"):
        cache.append(drawn(1, 3, 4), drawn(2, 2, 4))
    with pytest.raises(InvalidArgument, match=r"^capacity: got 0"):
        KVCache(batch=2, kv_heads=2, head_dim=16, capacity=0)
    assert len(cache) == 40


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own
def test_two_graphs_serve_a_prompt_and_all_that_follows() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k, v)
        return cache.attend(q)

    compiled = torch.compile(step, fullgraph=True, backend=count)
    eager, traced = (KVCache(batch=2, kv_heads=2, head_dim=16, capacity=16) for _ in range(2))
    with torch.no_grad():
        for seed, rows in enumerate((5, 1, 1, 1, 1)):
            q, k, v = (drawn(3 * seed + x, heads, rows) for x, heads in ((0, 4), (1, 2), (2, 2)))
            assert_same_bits(compiled(traced, q, k, v), step(eager, q, k, v), f"step {seed}")
    assert len(graphs) == 2
    assert len(traced) == len(eager)
