"""Empty sequences beside tables of any size, and tensors that lie at odd addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks, scores

TABLE = torch.randn(5, requires_grad=True)
EMPTY: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "a score by key": ((2, 5, 0), {"score": lambda s, b, h, m, n: s + TABLE[n]}),
    "a score by query": ((2, 0, 5), {"score": lambda s, b, h, m, n: s + TABLE[m]}),
    "a score by batch item": ((0, 3, 4), {"score": lambda s, b, h, m, n: s + TABLE[b]}),
    "a mask by key": ((2, 5, 0), {"mask": lambda b, h, m, n: (TABLE.detach() > 0)[n]}),
    "a mask by query": ((2, 0, 5), {"mask": lambda b, h, m, n: (TABLE.detach() > 0)[m]}),
    "an expression": ((2, 0, 5), {"score": lambda s, b, h, m, n: s * TABLE[m] + TABLE[m]}),
}


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("name", EMPTY)
def test_a_table_longer_than_an_empty_sequence(name: str, backend: str) -> None:
    (batch, queries, keys), keywords = EMPTY[name]
    q = torch.randn(batch, 2, queries, 8, requires_grad=True)
    k, v = (torch.randn(batch, 2, keys, 8) for _ in "kv")
    out = tilewise.attention(q, k, v, backend=backend, **keywords)
    assert out.shape == q.shape
    assert not bool(out.any())
    if "score" in keywords:
        grad_q, grad_table = torch.autograd.grad(out.sum(), [q, TABLE], materialize_grads=True)
        assert not bool(grad_q.any() | grad_table.any())


def _odd(tensor: Tensor) -> Tensor:
    """The same numbers, one byte behind a multiple of their size."""
    raw = bytearray(1) + tensor.detach().contiguous().numpy().tobytes()
    moved = torch.frombuffer(raw, dtype=tensor.dtype, offset=1).view(tensor.shape)
    assert moved.data_ptr() % moved.element_size() != 0
    return moved


@pytest.mark.parametrize("place", range(4))
def test_misaligned_operands_are_refused(place: int, isa: str) -> None:
    """q, k, v and the gradient of the output: a vector load of them could be a fault."""
    q, k, v, grad = (torch.randn(1, 2, 9, 8) for _ in range(4))
    given = [q, k, v, grad]
    given[place] = _odd(given[place])
    leaves = [x.requires_grad_() for x in given[:3]]

    def both() -> None:
        out = tilewise.attention(*leaves, backend="cpu")
        torch.autograd.grad(out, leaves, given[3])

    with pytest.raises(ValueError, match=r"is not aligned to its elements; pass a copy"):
        both()


def test_misaligned_captured_tensors_are_copied(isa: str) -> None:
    """Masks, scores, sinks and lengths: same bits, gradients of the tensors that were given."""
    q, k, v = (torch.randn(2, 2, 70, 8) for _ in "qkv")
    bias, table, sinks = torch.randn(2, 70, 70), torch.randn(70), torch.randn(2)
    ids = torch.arange(70) // 30
    results = []
    for move in (torch.clone, _odd):
        held, learned, sunk = (move(x).requires_grad_() for x in (bias, table, sinks))
        lengths, documents = move(torch.tensor([50, 70])), move(ids)

        def score(s: Any, _b: Any, _h: Any, m: Any, n: Any, learned: Tensor = learned) -> Any:
            return s * learned[m] + learned[n]

        out = tilewise.attention(
            q,
            k,
            v,
            mask=masks.lengths(lengths) & masks.document(documents),
            score=[score, scores.bias(held)],
            sinks=sunk,
            backend="cpu",
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), [held, learned, sunk])))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_misaligned_starts_are_copied(isa: str) -> None:
    q = torch.randn(12, 2, 8)
    starts = torch.tensor([0, 5, 12])
    expected = tilewise.attention_varlen(q, q, q, starts, starts, backend="cpu")
    moved = _odd(starts)
    assert torch.equal(tilewise.attention_varlen(q, q, q, moved, moved, backend="cpu"), expected)
