"""The calls: what they return, held plans, packed sequences, seeds, and empty problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.engine.samples import packed, qkv
from tests.plain import attend
from tilewise import masks, scores
from tilewise.errors import InvalidArgument, InvalidType


def test_more_comes_as_a_named_tuple(backend: str) -> None:
    q, k, v = qkv(False)
    out = tilewise.attention(q, k, v, backend=backend)
    result = tilewise.attention(q, k, v, return_lse=True, return_stats=True, backend=backend)
    plain = attend(q, k, v)
    assert torch.equal(result.out, out)
    torch.testing.assert_close(result.lse, plain.lse)
    assert tilewise.attention(q, k, v, return_lse=True, backend=backend).stats is None
    max_logit, lse, entropy, top1 = result.stats
    assert lse is result.lse
    torch.testing.assert_close(max_logit, plain.max_logit)
    torch.testing.assert_close(entropy, plain.entropy)
    assert top1 is None
    result = tilewise.attention(q, k, v, return_stats="top1", backend=backend)
    assert result.lse is None
    assert torch.equal(result.stats.top1, plain.s.argmax(-1))
    assert torch.equal(result.stats.entropy, entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_output_alone_has_the_same_bits(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (x.to(dtype) for x in qkv(False))
    wanted = tilewise.attention(q, k, v, return_lse=True, backend=backend)
    assert torch.equal(tilewise.attention(q, k, v, backend=backend), wanted.out)
    q, k, v, cu_q, cu_k = packed(False)
    rest = (q.to(dtype), k.to(dtype), v.to(dtype), cu_q, cu_k)
    whole = tilewise.attention_varlen(*rest, return_lse=True, backend=backend)
    assert torch.equal(tilewise.attention_varlen(*rest, backend=backend), whole.out)


def test_other_tensors_of_the_same_sizes_are_another_call(backend: str) -> None:
    q, k, v = qkv(False)
    plan = tilewise.plan(q, k, v, backend=backend)
    for keywords in ({"backend": backend}, {"plan": plan}):
        wanted = tilewise.attention(q, k, v, **keywords)
        assert torch.equal(tilewise.attention(q, k, v, **keywords), wanted)
        with pytest.raises(InvalidArgument, match=r"^q: got layout torch.sparse_coo"):
            tilewise.attention(q.to_sparse(), k, v, **keywords)
        with pytest.raises(InvalidArgument, match=r"^(k: got torch.float64|plan: got)"):
            tilewise.attention(q, k.double(), v, **keywords)
        with pytest.raises(InvalidArgument, match=r"^(k|v|plan): got"):
            tilewise.attention(q, k[:, :, :-1], v, **keywords)


def test_statistics_of_a_held_plan(backend: str) -> None:
    q, k, v = qkv(False)
    plan = tilewise.plan(q, k, v, backend=backend)
    result = tilewise.attention(q, k, v, return_stats="top1", plan=plan)
    wanted = tilewise.attention(q, k, v, return_stats="top1", backend=backend)
    assert torch.equal(result.out, tilewise.attention(q, k, v, plan=plan))
    for mine, theirs in zip(result.stats, wanted.stats, strict=True):
        assert torch.equal(mine, theirs)


def test_the_output_follows_the_memory_order_of_q(backend: str) -> None:
    for swapped in (False, True):
        out = tilewise.attention(*qkv(False, swapped=swapped), backend=backend)
        assert (out.transpose(1, 2) if swapped else out).is_contiguous()


@pytest.mark.parametrize("listed", [False, True])
def test_a_boolean_is_no_number_that_came_before(listed: bool, backend: str) -> None:
    """True is equal to 1.0, and False to 0.0."""
    keywords: dict[str, Any] = {"backend": backend}
    keywords |= {"keys": torch.zeros(2, 1, 5, 1, dtype=torch.int64)} if listed else {}
    tilewise.attention(*qkv(), scale=1.0, **keywords)
    with pytest.raises(InvalidType, match="scale: got a bool"):
        tilewise.attention(*qkv(), scale=True, **keywords)
    with pytest.raises(InvalidType, match="dropout_p: got a bool"):
        tilewise.attention(*qkv(), scale=1.0, dropout_p=False, **keywords)


def test_a_held_plan_gives_the_same_bits(backend: str) -> None:
    q, k, v = qkv(False)
    mask, score = masks.causal(), scores.softcap(5.0)
    plan = tilewise.plan(q, k, v, mask=mask, score=score, scale=0.3, backend=backend)
    wanted = tilewise.attention(q, k, v, mask=mask, score=score, scale=0.3, backend=backend)
    assert torch.equal(tilewise.attention(q, k, v, plan=plan), wanted)
    again = tilewise.attention(q, k, v, mask=mask, score=score, scale=0.3, plan=plan)
    assert torch.equal(again, wanted)
    assert f"backend={backend!r}" in repr(plan)


def test_a_held_plan_takes_captured_tensors_at_the_call(backend: str) -> None:
    q, k, v = qkv(False)
    plan = tilewise.plan(q, k, v, mask=masks.lengths(torch.tensor([7, 7])), backend=backend)
    for lengths in ([3, 7], [0, 5]):
        mask = masks.lengths(torch.tensor(lengths))
        wanted = tilewise.attention(q, k, v, mask=mask, backend=backend)
        assert torch.equal(tilewise.attention(q, k, v, mask=mask, plan=plan), wanted)
    with pytest.raises(InvalidArgument, match=r"^plan: .*passed again"):
        tilewise.attention(q, k, v, plan=plan)


def test_a_held_plan_of_packed_sequences(backend: str) -> None:
    q, k, v, cu_q, cu_k = packed(False)
    plan = tilewise.plan(q, k, v, cu_q, cu_k, mask=masks.causal(), backend=backend)
    wanted = tilewise.attention_varlen(q, k, v, cu_q, cu_k, mask=masks.causal(), backend=backend)
    assert torch.equal(tilewise.attention_varlen(q, k, v, cu_q, cu_k, plan=plan), wanted)
    three = torch.tensor([0, 1, 2, 6])
    with pytest.raises(InvalidArgument, match=r"^plan: got a plan for 2 sequences"):
        tilewise.attention_varlen(q, k, v, three, torch.tensor([0, 1, 2, 9]), plan=plan)
    with pytest.raises(InvalidArgument, match=r"^cu_seqlens_k: got 10"):
        tilewise.attention_varlen(q, k, v, cu_q, torch.tensor([0, 5, 10]), plan=plan)
    with pytest.raises(InvalidArgument, match=r"^plan: "):
        tilewise.attention(*qkv(False), plan=plan)


OTHER_CALLS: dict[str, dict[str, Any]] = {
    "mask": {"mask": masks.causal()},
    "score": {"score": scores.softcap(1.0)},
    "scale": {"scale": 0.1},
    "dropout": {"dropout_p": 0.1},
    "sinks": {"sinks": torch.zeros(4)},
    "backend": {"backend": "cpu"},
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_a_held_plan_is_for_its_own_call(name: str) -> None:
    plan = tilewise.plan(*qkv(), backend="tiled")
    with pytest.raises(InvalidArgument, match=r"^plan: "):
        tilewise.attention(*qkv(), plan=plan, **OTHER_CALLS[name])


def test_a_held_plan_is_for_its_own_shapes() -> None:
    q, k, v = qkv()
    plan = tilewise.plan(q, k, v, backend="tiled")
    for other in ((q[:1], k[:1], v[:1]), (q.double(), k.double(), v.double())):
        with pytest.raises(InvalidArgument, match=r"^plan: got a plan for q \[2, 4, 5, 8\]"):
            tilewise.attention(*other, plan=plan)


def test_a_plan_checks_what_is_captured() -> None:
    with pytest.raises(InvalidArgument, match="the length 8"):
        tilewise.plan(*qkv(), mask=masks.lengths(torch.tensor([1, 8])), backend="tiled")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_integers_serve_as_cu_seqlens(dtype: torch.dtype, backend: str) -> None:
    q, k, v, cu_q, cu_k = packed(False)
    wanted = tilewise.attention_varlen(q, k, v, cu_q, cu_k, backend=backend)
    wide = torch.stack([cu_q, cu_q], 1).to(dtype)[:, 0]
    found = tilewise.attention_varlen(q, k, v, wide, cu_k.to(dtype), backend=backend)
    assert torch.equal(found, wanted)


def _dropped(backend: str, **keywords: Any) -> Tensor:
    return tilewise.attention(*qkv(False), dropout_p=0.5, backend=backend, **keywords)


def test_seeds(backend: str) -> None:
    first = _dropped(backend, seed=5)
    assert torch.equal(first, _dropped(backend, seed=5))
    assert torch.equal(first, _dropped(backend, seed=torch.tensor(5)))
    assert not torch.equal(first, _dropped(backend, seed=6))
    assert torch.equal(_dropped(backend, seed=-1), _dropped(backend, seed=2**64 - 1))
    torch.manual_seed(1)
    drawn, next_drawn = _dropped(backend), _dropped(backend)
    assert not torch.equal(drawn, next_drawn)
    torch.manual_seed(1)
    assert torch.equal(drawn, _dropped(backend))


def test_without_dropout_torch_s_generator_is_left_alone(backend: str) -> None:
    before = torch.get_rng_state()
    tilewise.attention(*qkv(), backend=backend)
    assert torch.equal(before, torch.get_rng_state())


# ---- Empty sequences beside tables of any size, and tensors that lie at odd addresses.


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
