"""Gradients of what scores load, in Triton's interpreter: lines, pairs, tables of tiles, parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.gpu.passes import (
    BLOCKS,
    NAN,
    all_needs,
    backward,
    forward,
    prepare_backward,
    variant,
)
from tests.oracle import Sent
from tests.plain import PairFunction
from tests.variants import some_masks
from tests.variants.calls import Maker, Sizes
from tests.variants_catalogue import CATALOGUE, Call, Variant
from tilewise.kernels.gpu.backward.captured import form_of
from tilewise.kernels.gpu.config import Blocks, Parts
from tilewise.problem import Operands, Problem
from tilewise.sparse import BlockMask

PARTS = Parts(0, 0, 0, 0, 0)  # of every width
SIZES = Sizes(batch=2, heads=2, queries=21, keys=35)


class Form(NamedTuple):
    """A score that loads from a table of a shape, and the lines of pairs that share an element."""

    shape: tuple[int, ...]
    score: Callable[[Tensor], PairFunction]
    lines: tuple[str, ...]

    def variant(self, name: str, mask: Maker | None = None) -> Variant:
        """The score over a table that learns."""
        return Variant(name, mask, lambda d: self.score(d.learned("table", *self.shape)))


DIAGONALS, PAIRS = ("diagonals",), ("pairs",)
FORMS = {
    "buckets": Form((2, 7), lambda t: lambda s, b, h, m, n: s + t[h, abs(m - n) // 7], DIAGONALS),
    "relative": Form((60,), lambda t: lambda s, b, h, m, n: s * t[m - n + 34], DIAGONALS),
    "clipped": Form((2, 3), lambda t: lambda s, b, h, m, n: s + t[b, 2 * (n - m)] * s, DIAGONALS),
    "hashed": Form((5, 3), lambda t: lambda s, b, h, m, n: s + t[(m * n) % 5, (m + n) % 3], PAIRS),
    "scattered": Form(
        (11, 13), lambda t: lambda s, b, h, m, n: s + t[(m * n) % 11, (m + n) % 13], PAIRS
    ),
    "rows": Form((6,), lambda t: lambda s, b, h, m, n: s * t[m // 4], ("rows",)),
    "columns": Form((7, 2), lambda t: lambda s, b, h, m, n: s + t[n // 5, h] * s, ("columns",)),
    "twice": Form((64,), lambda t: lambda s, b, h, m, n: s + t[m] - s * t[n], ("rows", "columns")),
    "by-itself": Form((40, 50), lambda t: lambda s, b, h, m, n: s * t[m, n], PAIRS),
    "cut-short": Form((9, 20), lambda t: lambda s, b, h, m, n: s * t[m, n], PAIRS),
    "heads": Form((2, 1), lambda t: lambda s, b, h, m, n: s * t[h, m], ("rows",)),
    "exchanged": Form((35, 2, 21), lambda t: lambda s, b, h, m, n: s * t[n, b, m], PAIRS),
    "unused": Form((3,), lambda t: lambda s, b, h, m, n: s + t[m % 3].floor(), ()),
}


def _sent(call: Call) -> Sent:
    return Sent(call.grad_out, call.grad_lse)


def _check_call(variant: Variant, blocks: Blocks = BLOCKS[0], parts: Parts | None = None) -> Call:
    """All gradients of a call of a variant, by the 2x rule in float32."""
    call = Call(variant, torch.float32, SIZES)
    problem, operands = call.asked()
    learns = tuple(x.requires_grad for x in operands.score_tensors)
    needs = all_needs(operands)._replace(score_tensors=learns)
    with torch.no_grad():
        grads = backward(problem, operands, _sent(call), blocks, needs, parts=parts)
    wanted = [x for x in operands.score_tensors if x.requires_grad]
    learned = [call.leaves[name] for name in call.made.captured]
    by_slot = [grad for grad in grads.score_tensors if grad is not None]
    captured: tuple[Tensor, ...] = ()
    if learned:
        captured = torch.autograd.grad(wanted, learned, by_slot, materialize_grads=True)
    got = {"q": grads.q, "k": grads.k, "v": grads.v, "sinks": grads.sinks}
    got |= dict(zip(call.made.captured, captured, strict=True))
    plain, truth = call.dense(torch.float32), call.dense(torch.float64)
    for name, grad in got.items():
        if grad is not None:
            assert_exact(grad, plain[name], truth[name], f"{variant}: grad of {name}")
    return call


@pytest.mark.parametrize("name", FORMS)
def test_loads_of_every_form(name: str) -> None:
    """What expressions load: by lines, by pairs, twice, and where indices are clamped."""
    mask = some_masks.causal if len(name) % 2 else None
    _check_call(FORMS[name].variant(name, mask))


@pytest.mark.parametrize(
    "name", ["relative", "hashed", "scattered", "rows", "columns", "exchanged"]
)
def test_loads_of_every_form_in_parts(name: str) -> None:
    """Diagonals, pairs, lines either way, and a tile of the tensor."""
    _check_call(FORMS[name].variant(name, some_masks.causal), parts=PARTS)


QUICK = ("t5", "swin", "temperature-of-rows", "forgetting", "undefined-above", "everything")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(each, marks=() if each.name in QUICK else (pytest.mark.slow,))
        for each in CATALOGUE
    ],
    ids=str,
)
def test_catalogue(variant: Variant) -> None:
    """Masks and scores as people write them."""
    _check_call(variant, BLOCKS[1])


@pytest.mark.parametrize("before", [None, lambda s, b, h, m, n: 3 * s.sin()], ids=["s", "chain"])
def test_loads_that_the_score_indexes(before: Any) -> None:
    """The element that a pair loads follows from its score, and so does whose the gradient is."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=generator) for _ in range(3))
    table = torch.linspace(0.5, 1.5, 9).requires_grad_()

    def looked_up(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * table[(s * 2 + 4).long()]

    score = [looked_up] if before is None else [before, looked_up]
    found = []
    for backend in ("gpu", "tiled"):
        out = tilewise.attention(q, k, v, score=score, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), [table]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_forms() -> None:
    """Which pairs load the same element is told by the indices alone."""
    found = {}
    for name, form in FORMS.items():
        problem, operands = Call(form.variant(name), torch.float32, SIZES).asked()
        own = variant(problem, operands)
        found[name] = [
            form_of(load, operands.score_tensors[slot].shape, problem, fits=False)
            for load, slot in zip(own.load_forms, own.load_slots, strict=True)
        ]
        assert tuple(each.lines for each in found[name]) == form.lines, name
    axes = {name: [form.axes for form in forms] for name, forms in found.items()}
    assert axes["by-itself"] == [{"m": 0, "n": 1}]
    assert axes["cut-short"] == [None]
    assert axes["heads"] == [{"h": 0}]
    assert axes["twice"] == [{"m": 0}, {"n": 0}]
    assert axes["exchanged"] == [{"n": 0, "b": 1, "m": 2}]


def _detached(call: Call) -> tuple[Problem, Operands]:
    """The problem of a call, without what autograd would record."""
    problem, operands = call.asked()
    q, k, v = (each.detach() for each in operands[:3])
    loaded = tuple(each.detach() for each in operands.score_tensors)
    return problem, operands._replace(q=q, k=k, v=v, score_tensors=loaded)


@pytest.mark.parametrize(
    "name",
    [
        *("scattered", "buckets"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("hashed", "columns", "rows")),
    ],
)
def test_tables_and_loads_of_every_form(name: str) -> None:
    """Walks that gather shares visit the tiles that a table lists, and the sums are the same."""
    call = Call(FORMS[name].variant(name, some_masks.documents), torch.float32, SIZES)
    sent = _sent(call)
    plain = backward(*_detached(call), sent, BLOCKS[0])
    mask: Any = BlockMask.of(call.made.mask, 21, 35, batch=2, heads=2, block=(8, 16))
    call.made = call.made._replace(mask=mask)
    problem, operands = _detached(call)
    assert problem.mask[-1].op == "tiles"
    torch.testing.assert_close(
        backward(problem, operands, sent, BLOCKS[0]).score_tensors, plain.score_tensors
    )
    result = forward(problem, operands, BLOCKS[0])
    _, todo = prepare_backward(problem, operands, result, sent, BLOCKS[0])
    names = ("line_kernel", "element_kernel")
    walks = [each for each in todo if each.kernel.__name__ in names]
    assert all(each.arguments["lists"][0] is not None for each in walks)
    assert len(walks) == {"scattered": 2, "buckets": 0}.get(name, 1)


@pytest.mark.parametrize("name", ["hashed", "scattered"])
def test_same_bits_in_every_run(name: str) -> None:
    """The guard shuffles the programs of each run; sums that are atomic are of integers."""
    call = Call(FORMS[name].variant(name, some_masks.causal), torch.float32, SIZES)
    problem, operands = call.asked()
    operands = operands._replace(score_tensors=tuple(x.detach() for x in operands.score_tensors))
    sent = _sent(call)
    first, second = (
        backward(problem, operands._replace(q=q.detach()), sent, BLOCKS[0])
        for q in (operands.q, operands.q)
    )
    assert first.score_tensors[0] is not None
    assert second.score_tensors[0] is not None
    assert_same_bits(first.score_tensors[0], second.score_tensors[0], "table")


@pytest.mark.parametrize("name", ["hashed", "scattered"])
def test_a_share_that_is_not_finite(name: str) -> None:
    """It makes the elements NaN that the row loads; where integers are summed, all of them."""
    call = Call(FORMS[name].variant(name, None), torch.float32, SIZES)
    problem, operands = call.asked()
    operands = operands._replace(score_tensors=tuple(x.detach() for x in operands.score_tensors))
    call.grad_out[0, 0, 3, 1] = NAN
    with torch.no_grad():
        grads = backward(problem, operands, Sent(call.grad_out), BLOCKS[0])
    found = grads.score_tensors[0]
    assert found is not None
    expected = torch.ones(found.shape, dtype=torch.bool)
    if name == "hashed":  # row 3 loads [3 * n % 5, (3 + n) % 3] of columns n
        n = torch.arange(SIZES.keys)
        expected = torch.zeros(found.shape, dtype=torch.bool)
        expected[3 * n % 5, (3 + n) % 3] = True
    assert torch.equal(found.isnan(), expected)
