"""The backward kernels in Triton's interpreter: exactness, leaks, bits, and their host side."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import Case
from tests.contract import assert_exact, assert_same_bits
from tests.inputs import Inputs, build
from tests.kernels.gpu.test_forward import BLOCKS, CASES, SMALL, forward
from tests.oracle import Reference, pool, problem_of, refer, refer_cached
from tests.variants import some_masks
from tests.variants.making import Drawn, Sizes
from tests.variants_catalogue import CATALOGUE, Call, Variant
from tilewise import masks
from tilewise.kernels.gpu.backward.forms import form_of
from tilewise.kernels.gpu.backward.passes import backward_launches
from tilewise.kernels.gpu.config import Blocks, Config, Parts
from tilewise.kernels.gpu.expressions.variant import variant_of
from tilewise.kernels.gpu.launch import Launch, run
from tilewise.problem import Grads, Needs, Operands, Problem, Result, Statistics
from tilewise.reference import tiled
from tilewise.sparse.block_mask import BlockMask

NAN = math.nan
HALVES = (torch.float16, torch.bfloat16)


class Upstream(NamedTuple):
    """The gradients that come in."""

    out: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None


def all_needs(operands: Operands) -> Needs:
    floats = tuple(tensor.is_floating_point() for tensor in operands.score_tensors)
    return Needs(True, True, True, floats, operands.sinks is not None)


def launches(
    problem: Problem,
    operands: Operands,
    result: Result,
    upstream: Upstream,
    blocks: Blocks,
    needs: Needs | None = None,
    parts: Parts | None = None,
) -> tuple[Grads, list[Launch]]:
    """Gradients that hold NaN still, and the launches that fill them, in small blocks."""
    needs = all_needs(operands) if needs is None else needs

    def room(tensor: Tensor | None, need: bool) -> Tensor | None:
        return torch.full_like(tensor, NAN) if need and tensor is not None else None

    q, k, v = (room(tensor, need) for tensor, need in zip(operands[:3], needs[:3], strict=True))
    captured = tuple(
        torch.full(tensor.shape, NAN, dtype=tensor.dtype) if need else None
        for tensor, need in zip(operands.score_tensors, needs.score_tensors, strict=True)
    )
    grads = Grads(q, k, v, captured, room(operands.sinks, needs.sinks))
    ranks = [
        tuple(x.dim() for x in tensors)
        for tensors in (operands.mask_tensors, operands.score_tensors)
    ]
    config = Config("interpreter", overrides=(("dq", blocks), ("dkdv", blocks)), parts=parts)
    variant = variant_of(problem, *ranks)
    incoming = (upstream.out, upstream.lse, needs, upstream.entropy)
    return grads, backward_launches(problem, operands, result, *incoming, grads, config, variant)


def backward(
    problem: Problem,
    operands: Operands,
    upstream: Upstream,
    blocks: Blocks,
    needs: Needs | None = None,
    statistics: Statistics = "",
    parts: Parts | None = None,
) -> Grads:
    """Both passes in small blocks."""
    result = forward(problem, operands, blocks, statistics, parts)
    grads, todo = launches(problem, operands, result, upstream, blocks, needs, parts)
    run(todo)
    return grads


def named(inputs: Inputs, problem: Problem, grads: Grads) -> dict[str, Tensor]:
    """The gradients of the leaves of the inputs, by their names."""
    found = {"q": grads.q, "k": grads.k, "v": grads.v, "sinks": grads.sinks}
    slots = [instr.slots[0] for instr in problem.score if instr.op == "bias"]
    found |= {f"bias{i}": grads.score_tensors[slot] for i, slot in enumerate(slots)}
    leaves = inputs.leaves
    return {
        name: grad.reshape(leaves[name].shape).to(leaves[name].dtype)
        for name, grad in found.items()
        if grad is not None
    }


def _gradients(inputs: Inputs, reference: Reference, blocks: Blocks) -> dict[str, Tensor]:
    problem, operands = problem_of(inputs.detached())
    upstream = Upstream(reference.grad_out, reference.grad_lse)
    got = named(inputs, problem, backward(problem, operands, upstream, blocks))
    assert got.keys() == inputs.leaves.keys()
    return got


def _check(case: Case, blocks: Blocks, inputs: Inputs, reference: Reference) -> None:
    for name, grad in _gradients(inputs, reference, blocks).items():
        plain, truth = reference.plain.grads[name], reference.oracle.grads[name]
        assert_exact(grad, plain, truth, f"{case}: grad of {name}")


def _check_pooled(case: Case, blocks: Blocks, draws: int) -> None:
    """As ``_check``, several draws as one problem (``oracle.check_pooled`` says why)."""
    inputs = [build(case, draw) for draw in range(draws)]
    references = [refer(case, each) for each in inputs]
    got = [_gradients(*each, blocks) for each in zip(inputs, references, strict=True)]
    plain = pool([reference.plain for reference in references]).grads
    truth = pool([reference.oracle for reference in references]).grads
    for name in got[0]:
        grads = torch.stack([each[name] for each in got])
        assert_exact(grads, plain[name], truth[name], f"{case}: grad of {name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_2x_rule_in_small_blocks(case: Case) -> None:
    """Every gradient, at sizes where each tile has an edge, in float32."""
    _check(case, BLOCKS[CASES.index(case) % len(BLOCKS)], *refer_cached(case))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES[1::3], ids=lambda case: case.name)
def test_the_2x_rule_of_halves(case: Case, dtype: torch.dtype) -> None:
    """A sample of the same in 16 bits."""
    case = case.of(dtype)
    _check(case, BLOCKS[0], *refer_cached(case))


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
    upstream = Upstream(reference.grad_out, reference.grad_lse)
    blocks = BLOCKS[1 if case.score else 2]
    result = forward(problem, operands, blocks)
    grads, todo = launches(problem, operands, result, upstream, blocks, parts=PARTS)
    parts = [launch.constants["FORM"].PART for launch in todo if "FORM" in launch.constants]
    assert len(parts) >= 2
    assert set(parts) == {16}
    run(todo)
    for name, grad in named(inputs, problem, grads).items():
        plain, truth = reference.plain.grads[name], reference.oracle.grads[name]
        assert_exact(grad, plain, truth, f"{case}: grad of {name}")


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
        _check_pooled(case, blocks, 6)
    else:
        _check(case, blocks, *refer_cached(case))


SIZES = Sizes(batch=2, heads=2, queries=21, keys=35)


def _buckets(d: Drawn) -> Any:
    table = d.learned("table", 2, 7)
    return lambda s, b, h, m, n: s + table[h, abs(m - n) // 7]


def _relative(d: Drawn) -> Any:
    table = d.learned("table", 60)
    return lambda s, b, h, m, n: s * table[m - n + 34]


def _clipped(d: Drawn) -> Any:
    table = d.learned("table", 2, 3)
    return lambda s, b, h, m, n: s + table[b, 2 * (n - m)] * s


def _hashed(d: Drawn) -> Any:
    table = d.learned("table", 5, 3)
    return lambda s, b, h, m, n: s + table[(m * n) % 5, (m + n) % 3]


def _scattered(d: Drawn) -> Any:
    table = d.learned("table", 11, 13)
    return lambda s, b, h, m, n: s + table[(m * n) % 11, (m + n) % 13]


def _of_rows(d: Drawn) -> Any:
    table = d.learned("table", 6)
    return lambda s, b, h, m, n: s * table[m // 4]


def _of_columns(d: Drawn) -> Any:
    table = d.learned("table", 7, 2)
    return lambda s, b, h, m, n: s + table[n // 5, h] * s


def _twice(d: Drawn) -> Any:
    table = d.learned("table", 64)
    return lambda s, b, h, m, n: s + table[m] - s * table[n]


def _by_itself(d: Drawn) -> Any:
    table = d.learned("table", 40, 50)
    return lambda s, b, h, m, n: s * table[m, n]


def _cut_short(d: Drawn) -> Any:
    table = d.learned("table", 9, 20)
    return lambda s, b, h, m, n: s * table[m, n]


def _of_heads(d: Drawn) -> Any:
    table = d.learned("table", 2, 1)
    return lambda s, b, h, m, n: s * table[h, m]


def _exchanged(d: Drawn) -> Any:
    table = d.learned("table", 35, 2, 21)
    return lambda s, b, h, m, n: s * table[n, b, m]


def _unused(d: Drawn) -> Any:
    table = d.learned("table", 3)
    return lambda s, b, h, m, n: s + table[m % 3].floor()


FORMS: dict[str, Any] = {
    "buckets": _buckets,
    "relative": _relative,
    "clipped": _clipped,
    "hashed": _hashed,
    "scattered": _scattered,
    "rows": _of_rows,
    "columns": _of_columns,
    "twice": _twice,
    "by-itself": _by_itself,
    "cut-short": _cut_short,
    "heads": _of_heads,
    "exchanged": _exchanged,
    "unused": _unused,
}


def _check_call(variant: Variant, blocks: Blocks = BLOCKS[0], parts: Parts | None = None) -> Call:
    """All gradients of a call of a variant, by the 2x rule in float32."""
    call = Call(variant, torch.float32, SIZES)
    problem, operands = call.asked()
    upstream = Upstream(call.grad_out, call.grad_lse)
    with torch.no_grad():
        needs = Needs(True, True, True, tuple(x.requires_grad for x in operands.score_tensors))
        needs = needs._replace(sinks=operands.sinks is not None)
        grads = backward(problem, operands, upstream, blocks, needs, parts=parts)
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
    _check_call(Variant(name, mask, FORMS[name]))


@pytest.mark.parametrize(
    "name", ["relative", "hashed", "scattered", "rows", "columns", "exchanged"]
)
def test_loads_of_every_form_in_parts(name: str) -> None:
    """Diagonals, pairs, lines either way, and a tile of the tensor."""
    _check_call(Variant(name, some_masks.causal, FORMS[name]), parts=PARTS)


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
    for name, maker in FORMS.items():
        problem, operands = Call(Variant(name, None, maker), torch.float32, SIZES).asked()
        variant = variant_of(problem, (), tuple(x.dim() for x in operands.score_tensors))
        found[name] = [
            form_of(form, operands.score_tensors[slot].shape, problem, fits=False)
            for form, slot in zip(variant.load_forms, variant.load_slots, strict=True)
        ]
    assert {name: [form.lines for form in forms] for name, forms in found.items()} == {
        "buckets": ["diagonals"],
        "relative": ["diagonals"],
        "clipped": ["diagonals"],
        "hashed": ["pairs"],
        "scattered": ["pairs"],
        "rows": ["rows"],
        "columns": ["columns"],
        "twice": ["rows", "columns"],
        "by-itself": ["pairs"],
        "cut-short": ["pairs"],
        "heads": ["rows"],
        "exchanged": ["pairs"],
        "unused": [],
    }
    axes = {name: [form.axes for form in forms] for name, forms in found.items()}
    assert axes["by-itself"] == [{"m": 0, "n": 1}]
    assert axes["cut-short"] == [None]
    assert axes["heads"] == [{"h": 0}]
    assert axes["twice"] == [{"m": 0}, {"n": 0}]
    assert axes["exchanged"] == [{"n": 0, "b": 1, "m": 2}]


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
    problem, operands = problem_of(inputs.detached())
    reference = refer(case, inputs)
    grad_entropy = torch.randn(reference.grad_lse.shape)
    upstream = Upstream(reference.grad_out, reference.grad_lse, grad_entropy)
    got = backward(problem, operands, upstream, BLOCKS[0], statistics="rows")
    needs = all_needs(operands)

    def by_tiles(dtype: torch.dtype) -> Grads:
        changed = [
            tensor.to(dtype) if isinstance(tensor, Tensor) else tensor for tensor in operands[:3]
        ]
        wide = operands._replace(
            q=changed[0],
            k=changed[1],
            v=changed[2],
            score_tensors=tuple(x.to(dtype) for x in operands.score_tensors),
            sinks=None if operands.sinks is None else operands.sinks.to(dtype),
        )
        asked = problem._replace(dtype=dtype)
        result = tiled.forward(asked, wide, "rows")
        grads = [None if x is None else x.to(dtype) for x in upstream]
        assert grads[0] is not None
        return tiled.backward(asked, wide, result, grads[0], grads[1], needs, grads[2])

    plain, truth = by_tiles(torch.float32), by_tiles(torch.float64)
    for name in ("q", "k", "v", "sinks"):
        mine, near, far = (getattr(each, name) for each in (got, plain, truth))
        assert (mine is None) == (far is None)
        if mine is not None:
            assert_exact(mine, near, far, f"{case}: grad of {name}")
    for slot in (instr.slots[0] for instr in problem.score if instr.op == "bias"):
        mine, near, far = (each.score_tensors[slot] for each in (got, plain, truth))
        assert mine is not None
        assert near is not None
        assert far is not None
        assert_exact(mine, near, far, f"{case}: grad of captured {slot}")


def test_only_what_is_needed() -> None:
    """Nothing is launched for a gradient that is not wanted; the others have the same bits."""
    case = Case("few", **SMALL | {"heads": 1, "kv_heads": 1})
    inputs, reference = refer_cached(case)
    problem, operands = problem_of(inputs.detached())
    upstream = Upstream(reference.grad_out)
    every = all_needs(operands)
    whole = backward(problem, operands, upstream, BLOCKS[0])
    for name, kernels in (("q", 2), ("k", 2), ("v", 2)):
        q, k, v = (name == other for other in "qkv")
        needs = Needs(q, k, v, (False,) * len(every.score_tensors))
        result = forward(problem, operands, BLOCKS[0])
        grads, todo = launches(problem, operands, result, upstream, BLOCKS[0], needs)
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
    upstream = Upstream(torch.randn(3, 2, 37, 16))
    clean = backward(problem, operands, upstream, BLOCKS[0])
    for b, length in enumerate(lengths.tolist()):
        inputs.k[b, :, length:] = NAN
        inputs.v[b, :, length:] = NAN
    got = backward(problem, operands, upstream, BLOCKS[0])
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
    upstream = Upstream(torch.randn(1, 2, 64, 16))
    clean = backward(problem, operands, upstream, BLOCKS[0])
    for tensor in (inputs.q, inputs.k, inputs.v, upstream.out):
        tensor[:, :, 32:48] = NAN
    got = backward(problem, operands, upstream, BLOCKS[0])
    keep = torch.tensor([*range(32), *range(48, 64)])
    for name in "qkv":
        mine, expected = getattr(got, name)[:, :, keep], getattr(clean, name)[:, :, keep]
        assert_same_bits(mine, expected, name)
        assert bool(getattr(got, name)[:, :, 32:48].isnan().all())


@pytest.mark.parametrize("rectangle", [(8, 8), (16, 32), (24, 40)])
def test_tables(rectangle: tuple[int, int]) -> None:
    """A BlockMask changes no gradient, whatever its rectangles are to the tiles."""
    biases = ("bias", "bias_rows", "bias_keys")
    case = Case("table", **SMALL, mask=("document",), score=biases)
    inputs = build(case).detached()
    problem, operands = problem_of(inputs)
    upstream = Upstream(torch.randn(1, 2, 37, 16))
    expected = backward(problem, operands, upstream, BLOCKS[0])
    mask = BlockMask.of(inputs.mask, 37, 45, batch=1, heads=2, block=rectangle)
    tabled, with_table = problem_of(inputs._replace(mask=mask))
    assert tabled.mask[-1].op == "tiles"
    got = backward(tabled, with_table, upstream, BLOCKS[0])
    for name in "qkv":
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    torch.testing.assert_close(got.score_tensors, expected.score_tensors)


def _asked(call: Call) -> tuple[Problem, Operands]:
    """The problem of a call, without what autograd would record."""
    problem, operands = call.asked()
    q, k, v = (each.detach() for each in operands[:3])
    loaded = tuple(each.detach() for each in operands.score_tensors)
    return problem, operands._replace(q=q, k=k, v=v, score_tensors=loaded)


@pytest.mark.parametrize("name", ["hashed", "scattered", "rows", "columns", "buckets"])
def test_tables_and_loads_of_every_form(name: str) -> None:
    """Walks that gather shares visit the tiles that a table lists, and the sums are the same."""
    call = Call(Variant(name, some_masks.documents, FORMS[name]), torch.float32, SIZES)
    upstream = Upstream(call.grad_out, call.grad_lse)
    plain = backward(*_asked(call), upstream, BLOCKS[0])
    mask: Any = BlockMask.of(call.made.mask, 21, 35, batch=2, heads=2, block=(8, 16))
    call.made = call.made._replace(mask=mask)
    problem, operands = _asked(call)
    assert problem.mask[-1].op == "tiles"
    torch.testing.assert_close(
        backward(problem, operands, upstream, BLOCKS[0]).score_tensors, plain.score_tensors
    )
    result = forward(problem, operands, BLOCKS[0])
    _, todo = launches(problem, operands, result, upstream, BLOCKS[0])
    names = ("line_kernel", "spread_pairs_kernel", "table_kernel")
    walks = [each for each in todo if each.kernel.__name__ in names]
    assert all(each.arguments["lists"][0] is not None for each in walks)
    assert len(walks) == {"scattered": 2, "buckets": 0}.get(name, 1)


def test_upstream_of_any_strides() -> None:
    """Expanded, transposed and sparse gradients come in; results lie in any order."""
    case = Case("strides", **SMALL, score=("softcap",), sinks=True)
    inputs, reference = refer_cached(case)
    problem, operands = problem_of(inputs.detached())
    out, lse = reference.grad_out, reference.grad_lse
    expected = backward(problem, operands, Upstream(out, lse), BLOCKS[0])
    sparse = torch.full((*lse.shape, 3), NAN)
    sparse[..., 1] = lse
    moved = out.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    got = backward(problem, operands, Upstream(moved, sparse[..., 1]), BLOCKS[0])
    for name in ("q", "k", "v", "sinks"):
        assert_same_bits(getattr(got, name), getattr(expected, name), name)
    ones = torch.ones(()).expand(out.shape)
    got = backward(problem, operands, Upstream(ones), BLOCKS[0])
    expected = backward(problem, operands, Upstream(ones.contiguous()), BLOCKS[0])
    for name in ("q", "k", "v", "sinks"):
        assert_same_bits(getattr(got, name), getattr(expected, name), name)


@pytest.mark.parametrize("name", ["hashed", "scattered"])
def test_same_bits_in_every_run(name: str) -> None:
    """The guard shuffles the programs of each run; sums that are atomic are of integers."""
    call = Call(Variant(name, some_masks.causal, FORMS[name]), torch.float32, SIZES)
    problem, operands = call.asked()
    operands = operands._replace(score_tensors=tuple(x.detach() for x in operands.score_tensors))
    upstream = Upstream(call.grad_out, call.grad_lse)
    first, second = (
        backward(problem, operands._replace(q=q.detach()), upstream, BLOCKS[0])
        for q in (operands.q, operands.q)
    )
    assert first.score_tensors[0] is not None
    assert second.score_tensors[0] is not None
    assert_same_bits(first.score_tensors[0], second.score_tensors[0], "table")


@pytest.mark.parametrize("name", ["hashed", "scattered"])
def test_a_share_that_is_not_finite(name: str) -> None:
    """It makes the elements NaN that the row loads; where integers are summed, all of them."""
    call = Call(Variant(name, None, FORMS[name]), torch.float32, SIZES)
    problem, operands = call.asked()
    operands = operands._replace(score_tensors=tuple(x.detach() for x in operands.score_tensors))
    call.grad_out[0, 0, 3, 1] = NAN
    with torch.no_grad():
        grads = backward(problem, operands, Upstream(call.grad_out), BLOCKS[0])
    found = grads.score_tensors[0]
    assert found is not None
    expected = torch.ones(found.shape, dtype=torch.bool)
    if name == "hashed":  # row 3 loads [3 * n % 5, (3 + n) % 3] of columns n
        n = torch.arange(SIZES.keys)
        expected = torch.zeros(found.shape, dtype=torch.bool)
        expected[3 * n % 5, (3 + n) % 3] = True
    assert torch.equal(found.isnan(), expected)


def test_launches_without_values() -> None:
    """Host code reads no tensor: it makes the same launches for tensors without memory."""
    case = CASES[-2]
    problem, operands = problem_of(build(case).detached())
    result = tiled.forward(problem, operands)
    upstream = Upstream(torch.empty_like(result.out), torch.empty_like(result.lse))

    def empty(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(empty, value))
        return value.to("meta") if isinstance(value, Tensor) else value

    bare = Operands(*empty(tuple(operands)))
    _, real = launches(problem, operands, result, upstream, BLOCKS[0])
    _, meta = launches(
        problem,
        bare,
        Result(*empty(tuple(result))),
        Upstream(*empty(tuple(upstream))),
        BLOCKS[0],
    )
    assert [(one.kernel, one.grid, one.constants) for one in real] == [
        (one.kernel, one.grid, one.constants) for one in meta
    ]
