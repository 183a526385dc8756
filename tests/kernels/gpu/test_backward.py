"""The backward kernels in Triton's interpreter: exactness, leaks, bits, and their host side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cases import Case, Inputs, build
from tests.contract import assert_same_bits
from tests.kernels.gpu.passes import (
    BLOCKS,
    HALVES,
    NAN,
    SMALL,
    all_needs,
    backward,
    forward,
    on_meta,
    prepare_backward,
)
from tests.kernels.gpu.test_forward import CASES
from tests.oracle import Outcome, Sent, check, check_pooled, problem_of, refer, refer_cached, send
from tilewise import masks
from tilewise.kernels.gpu import run
from tilewise.kernels.gpu.config import Blocks, Parts
from tilewise.problem import Grads, Needs, Statistics
from tilewise.reference import tiled
from tilewise.sparse import BlockMask


def named(inputs: Inputs, grads: Grads) -> dict[str, Tensor]:
    """The gradients of the leaves of the inputs, by their names."""
    found = {"q": grads.q, "k": grads.k, "v": grads.v, "sinks": grads.sinks}
    found |= {f"captured {slot}": grads.score_tensors[slot] for slot in inputs.slots}
    leaves = inputs.leaves
    return {
        name: grad.reshape(leaves[name].shape).to(leaves[name].dtype)
        for name, grad in found.items()
        if grad is not None
    }


def _outcome(inputs: Inputs, sent: Sent, blocks: Blocks, statistics: Statistics = "") -> Outcome:
    """Output, lse and every gradient, in small blocks."""
    problem, operands = problem_of(inputs.detached())
    result = forward(problem, operands, blocks, statistics)
    grads, todo = prepare_backward(problem, operands, result, sent, blocks)
    run(todo)
    found = named(inputs, grads)
    assert found.keys() == inputs.leaves.keys()
    return Outcome(result.out, result.lse, found)


def _check(case: Case, blocks: Blocks) -> None:
    inputs, reference = refer_cached(case)
    check(_outcome(inputs, reference.sent, blocks), reference, str(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_2x_rule_in_small_blocks(case: Case) -> None:
    """Outputs and every gradient, at sizes where each tile has an edge, in float32."""
    _check(case, BLOCKS[CASES.index(case) % len(BLOCKS)])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES[1::3], ids=lambda case: case.name)
def test_the_2x_rule_of_halves(case: Case, dtype: torch.dtype) -> None:
    """A sample of the same in 16 bits."""
    _check(case.of(dtype), BLOCKS[0])


PARTS = Parts(0, 0, 0, 0, 0)  # of every width
PARTED = [
    CASES[5],
    Case("wide", **{**SMALL, "head_dim": 33, "value_dim": 64}, mask=("causal",), sinks=True),
    Case("scored", **{**SMALL, "head_dim": 40}, score=("softcap_tight", "bias"), dropout_p=0.4),
    Case("packed", head_dim=24, mask=("causal",), sequences=((33, 20), (0, 5), (16, 16))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PARTED, ids=lambda case: case.name)
def test_products_in_parts(case: Case, dtype: torch.dtype) -> None:
    """Summed over 16 columns at a time, of widths that are whole parts and that are none."""
    case = case.of(dtype)
    inputs, reference = refer_cached(case)
    problem, operands = problem_of(inputs.detached())
    blocks = BLOCKS[1 if case.score else 2]
    result = forward(problem, operands, blocks)
    grads, todo = prepare_backward(problem, operands, result, reference.sent, blocks, parts=PARTS)
    parts = [launch.constants["FORM"].PART for launch in todo if "FORM" in launch.constants]
    assert len(parts) >= 2
    assert set(parts) == {16}
    run(todo)
    check(Outcome(result.out, result.lse, named(inputs, grads)), reference, str(case))


BIASES = [
    Case(name, **SMALL | more, score=words)
    for name, words, more in (
        ("heads", ("bias_heads",), {"batch": 3, "mask": ("causal",)}),
        ("keys", ("bias_keys",), {"batch": 2, "mask": ("window",)}),
        ("rows", ("bias_rows",), {"batch": 2}),
        ("one", ("bias_one",), {"mask": ("lengths",)}),
        ("chain", ("bias_heads", "softcap_tight", "bias_keys"), {"sinks": True}),
        ("dropped", ("bias", "bias_rows"), {"dropout_p": 0.3}),
        ("no-rows", ("bias_keys", "bias_one"), {"queries": 0}),
        ("no-keys", ("bias_rows", "bias_heads"), {"keys": 0}),
        ("packed", ("bias_rows", "bias_one"), {"sequences": ((20, 33), (0, 5), (35, 18))}),
        ("packed-keys", ("bias_keys", "bias_heads"), {"sequences": ((20, 33), (7, 0), (5, 18))}),
    )
]


@pytest.mark.parametrize("case", BIASES, ids=lambda case: case.name)
def test_biases(case: Case) -> None:
    """A bias of every shape, alone and behind others."""
    blocks = BLOCKS[1 if case.dropout_p else 0]
    if "bias_one" in case.score:  # the error of a single number is luck
        check_pooled(case, range(6), lambda inputs, sent: _outcome(inputs, sent, blocks))
    else:
        _check(case, blocks)


ENTROPIES = [
    CASES[8],
    CASES[14],
    CASES[-3],
    Case("one", **SMALL, score=("bias_rows", "softcap_tight", "bias_one"), sinks=True),
    Case("packed-one", sequences=((20, 33), (0, 5), (35, 18)), score=("bias_rows",), dropout_p=0.3),
]


@pytest.mark.parametrize("case", ENTROPIES, ids=lambda case: case.name)
def test_gradient_of_the_entropy(case: Case) -> None:
    """Beside those of out and lse, sinks included, in float32 and in halves."""
    inputs = build(case)
    reference = refer(inputs, send(inputs, entropy=True))
    check(_outcome(inputs, reference.sent, BLOCKS[0], "rows"), reference, str(case))


def test_only_what_is_needed() -> None:
    """Nothing is launched for a gradient that is not wanted; the others have the same bits."""
    case = Case("few", **SMALL | {"heads": 1, "kv_heads": 1})
    inputs, reference = refer_cached(case)
    problem, operands = problem_of(inputs.detached())
    sent = Sent(reference.sent.out)
    every = all_needs(operands)
    whole = backward(problem, operands, sent, BLOCKS[0])
    for name, kernels in (("q", 2), ("k", 2), ("v", 2)):
        q, k, v = (name == other for other in "qkv")
        needs = Needs(q, k, v, (False,) * len(every.score_tensors))
        result = forward(problem, operands, BLOCKS[0])
        grads, todo = prepare_backward(problem, operands, result, sent, BLOCKS[0], needs)
        assert len(todo) == kernels
        run(todo)
        assert_same_bits(getattr(grads, name), getattr(whole, name), name)
        assert all(getattr(grads, other) is None for other in "qkv" if other != name)


def test_keys_past_a_length_do_not_leak() -> None:
    """NaN there changes not a bit, and gets a gradient of 0."""
    lengths = torch.tensor([17, 0, 40])
    case = Case("padding", **SMALL | {"batch": 3}, kv_heads=1)
    inputs = build(case).detached()._replace(mask=masks.lengths(lengths))
    problem, operands = problem_of(inputs)
    sent = Sent(torch.randn(3, 2, 37, 16))
    clean = backward(problem, operands, sent, BLOCKS[0])
    for b, length in enumerate(lengths.tolist()):
        inputs.k[b, :, length:] = NAN
        inputs.v[b, :, length:] = NAN
    got = backward(problem, operands, sent, BLOCKS[0])
    for name in "qkv":
        assert_same_bits(getattr(got, name), getattr(clean, name), name)
    for grad in (clean.k, clean.v):
        assert grad is not None
        for b, length in enumerate(lengths.tolist()):
            assert bool((grad[b, :, length:] == 0).all())


@pytest.mark.parametrize("banded", [True, False])
def test_hidden_tiles_do_not_leak(banded: bool) -> None:
    """Keys and rows in tiles that the mask hides, known from its bands or seen in the tile."""
    case = Case("far", **SMALL | {"queries": 64, "keys": 64})
    mask = masks.window(0, 0) if banded else masks.dense(torch.eye(64, dtype=torch.bool))
    inputs = build(case).detached()._replace(mask=mask)
    problem, operands = problem_of(inputs)
    sent = Sent(torch.randn(1, 2, 64, 16))
    clean = backward(problem, operands, sent, BLOCKS[0])
    for tensor in (inputs.q, inputs.k, inputs.v, sent.out):
        tensor[:, :, 32:48] = NAN
    got = backward(problem, operands, sent, BLOCKS[0])
    keep = torch.tensor([*range(32), *range(48, 64)])
    for name in "qkv":
        mine, expected = getattr(got, name)[:, :, keep], getattr(clean, name)[:, :, keep]
        assert_same_bits(mine, expected, name)
        assert bool(getattr(got, name)[:, :, 32:48].isnan().all())


@pytest.mark.parametrize(
    "rectangle",
    [(24, 40), *(pytest.param(each, marks=pytest.mark.thorough) for each in ((8, 8), (16, 32)))],
)
def test_tables(rectangle: tuple[int, int]) -> None:
    """A BlockMask changes no gradient, whatever its rectangles are to the tiles."""
    biases = ("bias", "bias_rows", "bias_keys")
    case = Case("table", **SMALL, mask=("document",), score=biases)
    inputs = build(case).detached()
    problem, operands = problem_of(inputs)
    sent = Sent(torch.randn(1, 2, 37, 16))
    expected = backward(problem, operands, sent, BLOCKS[0])
    mask = BlockMask.of(inputs.mask, 37, 45, batch=1, heads=2, block=rectangle)
    tabled, with_table = problem_of(inputs._replace(mask=mask))
    assert tabled.mask[-1].op == "tiles"
    got = backward(tabled, with_table, sent, BLOCKS[0])
    for name in "qkv":
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    torch.testing.assert_close(got.score_tensors, expected.score_tensors)


def test_upstream_of_any_strides() -> None:
    """Expanded, transposed and sparse gradients come in; results lie in any order."""
    case = Case("strides", **SMALL, score=("softcap",), sinks=True)
    inputs, reference = refer_cached(case)
    problem, operands = problem_of(inputs.detached())
    out, lse, _ = reference.sent
    expected = backward(problem, operands, Sent(out, lse), BLOCKS[0])
    sparse = torch.full((*lse.shape, 3), NAN)
    sparse[..., 1] = lse
    moved = out.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    got = backward(problem, operands, Sent(moved, sparse[..., 1]), BLOCKS[0])
    for name in ("q", "k", "v", "sinks"):
        assert_same_bits(getattr(got, name), getattr(expected, name), name)
    ones = torch.ones(()).expand(out.shape)
    got = backward(problem, operands, Sent(ones), BLOCKS[0])
    expected = backward(problem, operands, Sent(ones.contiguous()), BLOCKS[0])
    for name in ("q", "k", "v", "sinks"):
        assert_same_bits(getattr(got, name), getattr(expected, name), name)


def test_launches_without_values() -> None:
    """Host code reads no tensor: it makes the same launches for tensors without memory."""
    case = CASES[-2]
    problem, operands = problem_of(build(case).detached())
    result = tiled.forward(problem, operands)
    sent = Sent(torch.empty_like(result.out), torch.empty_like(result.lse))

    given = (operands, result, sent, BLOCKS[0])
    _, real = prepare_backward(problem, *given)
    _, meta = prepare_backward(problem, *on_meta(given))
    assert [(one.kernel, one.grid, one.constants) for one in real] == [
        (one.kernel, one.grid, one.constants) for one in meta
    ]
