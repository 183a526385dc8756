"""Determinism to the bit: runs, threads, and whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS, Case, Inputs, build
from tests.contract import assert_same_bits
from tests.kernels.targets import Target, only_cpu, pairs
from tests.oracle import Outcome, Sent, assert_same, attend, send
from tilewise import masks

GROUPED: dict[str, Any] = {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 40, "value_dim": 24}
CASES = [
    Case("plain", queries=130, keys=200, **GROUPED),
    Case("causal", queries=200, keys=200, **GROUPED, mask=("causal",)),
    Case("short", queries=7, keys=33, **GROUPED),
    Case("decode", queries=1, keys=400, **GROUPED),
    Case("masked", queries=150, keys=130, **GROUPED, mask=("lengths", "window", "and")),
    Case("scored", queries=130, keys=129, **GROUPED, score=("softcap", "alibi"), sinks=True),
    Case("biased", queries=65, keys=190, **GROUPED, score=("bias",), mask=("bool",)),
]
RUNS = [
    *CASES,
    Case("several-chunks", heads=4, queries=300, keys=1100, mask=("causal",), sinks=True),
    Case("dropped", queries=200, keys=130, score=("softcap", "bias_keys"), dropout_p=0.2),
    Case("packed", sequences=((70, 70), (0, 3), (129, 200)), mask=("causal",)),
]
ALL_DTYPES = [case.of(dtype) for case in CASES for dtype in FLOATS]


@pytest.mark.parametrize(
    ("target", "case"),
    pairs([case.of(dtype) for case in RUNS for dtype in FLOATS], 3),
    indirect=["target"],
)
def test_runs_and_threads(target: Target, case: Case) -> None:
    """The same call again, and with two and three threads: every gradient and statistic."""
    inputs = build(case)
    sent = send(inputs, entropy=True)
    expected = attend(inputs, target.backend, sent, statistics="top1")
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_same(attend(inputs, target.backend, sent, statistics="top1"), expected)


def _alone(inputs: Inputs, b: int, kv_head: int) -> Inputs:
    """One batch entry with one group of heads, in memory of its own."""
    group = inputs.q.size(1) // inputs.k.size(1)
    heads = slice(kv_head * group, (kv_head + 1) * group)

    def entry(tensor: Tensor, rows: slice) -> Tensor:
        first = slice(b, b + 1) if tensor.size(0) > 1 else slice(None)
        second = rows if tensor.size(1) > 1 else slice(None)
        return tensor.detach()[first, second].clone().requires_grad_(tensor.requires_grad)

    mask, score = inputs.mask, inputs.score
    if mask is not None:
        captured = [t[b : b + 1] if t.dim() == 1 else entry(t, heads) for t in mask.captured]
        mask = type(mask)(mask.program, tuple(captured))
    if score is not None:
        pieces = [t[heads] if t.dim() == 1 else entry(t, heads) for t in score.captured]
        score = type(score)(score.program, tuple(pieces))
    sinks = inputs.sinks
    return inputs._replace(
        q=entry(inputs.q, heads),
        k=entry(inputs.k, slice(kv_head, kv_head + 1)),
        v=entry(inputs.v, slice(kv_head, kv_head + 1)),
        mask=mask,
        score=score,
        sinks=None if sinks is None else sinks.detach()[heads].clone().requires_grad_(),
    )


@pytest.mark.parametrize(("target", "case"), pairs(ALL_DTYPES, 3), indirect=["target"])
def test_batch_invariance(target: Target, case: Case) -> None:
    """A batch entry's head group alone has the bits that it has in the batch."""
    inputs = build(case)
    sent = send(inputs)
    torch.set_num_threads(2)
    whole = attend(inputs, target.backend, sent)
    torch.set_num_threads(1)
    for b, kv_head in ((0, 0), (2, 1)):
        entry, heads, keys = (
            slice(b, b + 1),
            slice(2 * kv_head, 2 * kv_head + 2),
            slice(kv_head, kv_head + 1),
        )
        expected = Outcome(
            whole.out[entry, heads],
            whole.lse[entry, heads],
            {
                "q": whole.grads["q"][entry, heads],
                "k": whole.grads["k"][entry, keys],
                "v": whole.grads["v"][entry, keys],
            },
        )
        alone = _alone(inputs, b, kv_head)
        own = Sent(sent.out[entry, heads], sent.lse[entry, heads])
        assert_same(attend(alone, target.backend, own), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mask", [(), ("causal",)], ids=str)
def test_varlen_invariance(target: Target, mask: tuple[str, ...], dtype: torch.dtype) -> None:
    """A packed sequence alone has the bits, and the top keys, that it has among its neighbours."""
    lengths = ((70, 70), (1, 200), (0, 3), (129, 65), (200, 200), (5, 0))
    case = Case("packed", sequences=lengths, **GROUPED, mask=mask, score=("softcap",))
    inputs = build(case.of(dtype))
    sent = send(inputs, entropy=True)
    whole = attend(inputs, target.backend, sent, statistics="top1")
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = (cu.tolist() for cu in inputs.cu_seqlens)
    for i, (m, n) in enumerate(lengths):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone = inputs._replace(
            q=inputs.q.detach()[rows].clone().requires_grad_(),
            k=inputs.k.detach()[keys].clone().requires_grad_(),
            v=inputs.v.detach()[keys].clone().requires_grad_(),
            cu_seqlens=(torch.tensor([0, m]), torch.tensor([0, n])),
        )
        parts = {"q": rows, "k": keys, "v": keys}
        expected = Outcome(
            whole.out[rows],
            whole.lse[:, rows],
            {name: whole.grads[name][part] for name, part in parts.items()},
            *(fact[:, rows] for fact in whole[3:]),
        )
        own = Sent(sent.out[rows], sent.lse[:, rows], sent.entropy[:, rows])
        assert_same(attend(alone, target.backend, own, statistics="top1"), expected)


def test_batch_mates_lengths(target: Target) -> None:
    """How long the others are is nobody's business."""
    inputs = build(Case("mates", batch=3, queries=65, keys=300))
    sent = send(inputs)
    found = []
    for mates in ((300, 300), (0, 1), (129, 64)):
        mask = masks.lengths(torch.tensor([mates[0], 177, mates[1]]))
        found.append(attend(inputs._replace(mask=mask), target.backend, sent))
    for other in found[1:]:
        assert_same_bits(other.out[1], found[0].out[1], "out")
        for name in "qkv":
            assert_same_bits(other.grads[name][1], found[0].grads[name][1], f"grad of {name}")


def test_layouts_agree(target: Target) -> None:
    """Strides move data, not roundings."""
    case = Case("layouts", queries=70, keys=130, score=("softcap",), mask=("causal",))
    inputs = build(case)
    sent = send(inputs)
    expected = attend(inputs, target.backend, sent)

    def bshd(tensor: Tensor) -> Tensor:
        return tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()

    def sparse(tensor: Tensor) -> Tensor:
        wide = torch.full((*tensor.shape, 3), float("nan"))
        wide[..., 1] = tensor.detach()
        return wide[..., 1].requires_grad_()

    for change in (bshd, sparse):
        changed = inputs._replace(q=change(inputs.q), k=change(inputs.k), v=change(inputs.v))
        assert_same(attend(changed, target.backend, sent), expected)


@only_cpu
@pytest.mark.parametrize("width", [16, 80])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_how_many_queries_come_at_once(target: Target, dtype: torch.dtype, width: int) -> None:
    """From 9 on it changes no bit, wherever a row's tile ends; sums over the width have pieces."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(1, 4, 150, width, generator=generator).to(dtype)
    k, v = (torch.randn(1, 2, 300, width, generator=generator).to(dtype) for _ in range(2))
    many = tilewise.attention(q, k, v)
    for count in (9, 16, 17, 33, 65, 100):
        for first in (0, 7):
            rows = slice(first, first + count)
            found = tilewise.attention(q[:, :, rows], k, v)
            assert_same_bits(found, many[:, :, rows], f"{count} queries from {first} on")
