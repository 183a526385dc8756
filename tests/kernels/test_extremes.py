"""Dead rows, huge scores, infinite biases, and where NaN may and may not go."""

from __future__ import annotations

import math
import platform
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise
from tests.cases import FLOATS, TABLE, Case, Inputs, build
from tests.contract import assert_all_exact, assert_all_same_bits, assert_exact, assert_same_bits
from tests.kernels.targets import Target, only_cpu
from tests.oracle import Outcome, Sent, assert_same, attend, call, check, refer, send
from tilewise import masks, scores
from tilewise.variants.lower import statistics_dtype

NAN = math.nan


def _run(
    case: Case, target: Target, inputs: Inputs | None = None, *, statistics: Any = False
) -> Outcome:
    """The outcome, with gradients of out, lse and entropy that are all ones."""
    inputs = build(case) if inputs is None else inputs
    rows = inputs.q.shape[:-1]
    each = torch.ones(rows, dtype=statistics_dtype(case.dtype))
    ones = Sent(torch.ones(*rows, case.value_dim, dtype=case.dtype), each, each)
    return attend(inputs, target.backend, ones, statistics=statistics)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_rows_are_zero(target: Target, dtype: torch.dtype, sinks: bool) -> None:
    """Rows that see no key: out 0, entropy 0, no top key, no gradient from them or to them."""
    bias: dict[str, Any] = {"mask": ("causal",), "score": ("bias",)}
    case = Case("dead", queries=150, keys=70, **bias, sinks=sinks, dtype=dtype)
    inputs = build(case)
    got = _run(case, target, inputs, statistics="top1")
    dead = 150 - 70
    gone = [got.out, got.entropy, got.grads["q"], got.grads["captured 0"]]
    assert not any(bool(each[:, :, :dead].any()) for each in gone)
    assert bool((got.entropy[:, :, dead + 2 :] > 0).all())
    assert bool((got.max_logit[:, :, :dead] == -math.inf).all())
    assert bool((got.top1[:, :, :dead] == -1).all())
    assert bool((got.top1[:, :, dead:] >= 0).all())
    assert sinks or bool((got.lse[:, :, :dead] == -math.inf).all())
    assert bool((got.lse[:, :, dead:] > -math.inf).all())
    assert all(bool(grad.isfinite().all()) for grad in got.grads.values())
    alone = torch.zeros_like(got.entropy)
    alone[:, :, :dead] = 1
    got = attend(inputs, target.backend, Sent(entropy=alone), statistics=True)
    assert not any(bool(grad.any()) for grad in got.grads.values())


def test_dead_rows_with_sinks(target: Target) -> None:
    """Only the sink is left: lse is its logit, and it gets lse's gradient."""
    case = Case("dead-sinks", mask=("nothing",), sinks=True)
    inputs = build(case)
    got = _run(case, target, inputs)
    assert inputs.sinks is not None
    assert bool((got.out == 0).all())
    torch.testing.assert_close(got.lse, inputs.sinks.detach()[:, None].expand_as(got.lse))
    rows = case.batch * case.queries
    torch.testing.assert_close(got.grads["sinks"], torch.full((case.heads,), float(rows)))
    assert all(bool((got.grads[name] == 0).all()) for name in "qkv")


def near_ten_thousand(inputs: Inputs) -> None:
    """Make scores of 1e4 that differ by a few."""
    with torch.no_grad():
        inputs.q[..., 0] = inputs.k[..., 0] = 238.0


def within_ten_thousand(inputs: Inputs) -> None:
    """Make scores from -1e4 to 1e4 with a scale of 64, exact in any dtype."""
    with torch.no_grad():
        for tensor in (inputs.q, inputs.k):
            tensor.copy_((tensor.double() * 4).round().clamp(-8, 8))


def lower_biases(inputs: Inputs, low: float) -> None:
    """Put the lowest bias at every third key, in the whole of row 5, and at row 7 but for two."""
    assert inputs.score is not None
    bias = inputs.score.captured[0]
    with torch.no_grad():
        bias[:, :, :, ::3] = low
        bias[:, :, 5] = low
        bias[:, :, 7, :128] = low
        inputs.k[:, :, :] *= 0.1  # keeps score + min in range


LARGE = [
    Case("large", queries=129, keys=200),
    Case("large-causal", queries=129, keys=129, mask=("causal",)),
    Case("large-negative", queries=65, keys=65, scale=-(32**-0.5)),
    Case("large-softcap", queries=65, keys=65, score=("softcap",)),
    Case("large-bias", queries=65, keys=65, score=("bias",)),
]
# These with the row statistics, beside sinks that are none, far below, among and level with scores.
SINKS = {"large-keys": None, "none": -math.inf, "below": -1e4, "among": 0.0, "level": 1e4}
STATED = [
    Case(name, queries=65, keys=200, mask=("causal",), sinks=sink is not None)
    for name, sink in SINKS.items()
]
large = pytest.mark.parametrize(
    ("case", "statistics"),
    [*((case, False) for case in LARGE), *((case, True) for case in STATED)],
    ids=lambda each: each.name if isinstance(each, Case) else "",
)


def _check(inputs: Inputs, target: Target, case: Case, statistics: bool) -> Outcome:
    """The contract for out, lse and gradients; on request for the statistics and theirs too."""
    sink = SINKS.get(case.name)
    if inputs.sinks is not None and sink is not None:
        inputs.sinks.data.fill_(sink)
    reference = refer(inputs, send(inputs, entropy=statistics))
    actual = attend(inputs, target.backend, reference.sent, statistics=statistics)
    check(actual, reference, str(case))
    return actual


@large
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scores_near_ten_thousand(
    target: Target, case: Case, dtype: torch.dtype, statistics: bool
) -> None:
    """Scores of 1e4 that differ by a few: every digit that is left counts, in every gradient."""
    case = case.of(dtype)
    inputs = build(case)
    near_ten_thousand(inputs)
    actual = _check(inputs, target, case, statistics)
    assert float(abs(actual.lse).max()) > (1e4 if "softcap" not in case.name else 30)


@large
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scores_within_ten_thousand(
    target: Target, case: Case, dtype: torch.dtype, statistics: bool
) -> None:
    """Scores from -1e4 to 1e4, exact in any dtype: rows of one key, or of a few in a tie."""
    case = replace(case.of(dtype), scale=math.copysign(64.0, case.scale or 1.0))
    inputs = build(case)
    within_ten_thousand(inputs)
    actual = _check(inputs, target, case, statistics)
    assert float(abs(actual.lse).max()) > (1e4 if "softcap" not in case.name else 29)


@pytest.mark.parametrize("scale", [1e-20, 1e-38, 1e-46, 1e-300, 0.0])
def test_tiny_scales_average_what_is_visible(target: Target, scale: float) -> None:
    """Below the smallest float32 too: hidden pairs stay hidden, and nothing is NaN."""
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    mask = tilewise.masks.causal()
    out = tilewise.attention(q, k, v, mask=mask, scale=scale, backend=target.backend)
    mean = v.cumsum(2) / torch.arange(1, 21)[:, None]
    torch.testing.assert_close(out, mean, atol=1e-6, rtol=1e-5)
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("infinite", [True, False], ids=["-inf", "min"])
def test_lowest_biases(
    target: Target, dtype: torch.dtype, infinite: bool, statistics: bool
) -> None:
    """-inf excludes a key; finfo.min does too, unless every key of a row has it."""
    case = Case("lowest", queries=66, keys=130, score=("bias",), dtype=dtype)
    inputs = build(case)
    lower_biases(inputs, -math.inf if infinite else torch.finfo(dtype).min)
    actual = _check(inputs, target, case, statistics)
    if infinite:
        assert bool((actual.out[:, :, 5] == 0).all())
        assert bool((actual.lse[:, :, 5] == -math.inf).all())
    stats = call(inputs, target.backend, return_stats="top1").stats
    assert bool((stats.top1[:, :, 5] == -1).all()) == infinite
    assert bool((stats.top1[:, :, 7] >= 128).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_sink_in_a_dead_row(target: Target, dtype: torch.dtype) -> None:
    """A sink of -inf where nothing else is: no weight anywhere, and gradient 0."""
    case = Case("dead-sink", queries=70, keys=40, mask=("causal",), sinks=True, dtype=dtype)
    inputs = build(case)
    assert inputs.sinks is not None
    inputs.sinks.data[0] = -math.inf
    got = _run(case, target, inputs)
    assert bool((got.out[:, :, :30] == 0).all())
    assert bool((got.lse[:, 0, :30] == -math.inf).all())
    assert float(got.grads["sinks"][0]) == 0
    assert all(bool(grad.isfinite().all()) for grad in got.grads.values())


def test_any_byte_but_0_is_true(target: Target) -> None:
    """A boolean tensor may hold other bytes than 0 and 1 (numpy and views make them)."""
    q, k, v = (torch.randn(1, 2, rows, 16, requires_grad=True) for rows in (70, 130, 130))
    mask = torch.rand(1, 2, 70, 130) < 0.5
    expected = tilewise.attention(q, k, v, mask=mask, backend=target.backend)
    wanted = torch.autograd.grad(expected.sum(), (q, k, v))
    for byte in (2, 128, 255):
        odd = (mask.to(torch.uint8) * byte).view(torch.bool)
        for program in (odd, ~~masks.dense(odd), masks.dense(odd) & mask):
            out = tilewise.attention(q, k, v, mask=program, backend=target.backend)
            assert_same_bits(out, expected, f"byte {byte}: out")
            for grad, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), wanted, strict=True):
                assert_same_bits(grad, right, f"byte {byte}: grad")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_beyond_lengths_never_leaks(target: Target, dtype: torch.dtype) -> None:
    """What keys past a length hold changes not a bit, of statistics and gradients too."""
    case = Case("padding", batch=3, heads=4, keys=200, dtype=dtype)
    lengths = torch.tensor([77, 0, 130])
    inputs = build(case)._replace(mask=masks.lengths(lengths))
    clean = _run(case, target, inputs, statistics="top1")
    with torch.no_grad():
        for b, length in enumerate(lengths.tolist()):
            inputs.k[b, :, length:] = NAN
            inputs.v[b, :, length:] = NAN
    assert_same(_run(case, target, inputs, statistics="top1"), clean)
    for name in "kv":
        for b, length in enumerate(lengths.tolist()):
            assert bool((clean.grads[name][b, :, length:] == 0).all())


def test_nan_in_empty_tiles_never_leaks(target: Target) -> None:
    """Rows far from the window's NaN keys, and keys far from its NaN rows, stay clean."""
    case = Case("empty-tiles", batch=1, queries=1024, keys=1024)
    inputs = build(case)._replace(mask=masks.window(32, 0))
    clean = _run(case, target, inputs)
    with torch.no_grad():
        inputs.k[:, :, 768:] = NAN
        inputs.v[:, :, 768:] = NAN
    got = _run(case, target, inputs)
    assert_same_bits(got.out[:, :, :512], clean.out[:, :, :512], "out")
    assert bool(got.out[:, :, 768:].isnan().all())
    for name in "qkv":
        grad, expected = got.grads[name], clean.grads[name]
        assert_same_bits(grad[:, :, :480], expected[:, :, :480], f"grad of {name}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_hidden_nan_behind_an_odd_number_of_queries(target: Target, dtype: torch.dtype) -> None:
    """The lane behind the last query, which shares a word with it in 16 bits, brings none in."""
    case = Case("odd", queries=35, keys=64, dtype=dtype)
    inputs = build(case)._replace(mask=masks.causal("top_left"))
    clean = _run(case, target, inputs)
    with torch.no_grad():
        inputs.k[:, :, 35:] = NAN  # of which the mask would show the first to a query more
    got = _run(case, target, inputs)
    assert_same_bits(got.out, clean.out, "out")
    for name in "kv":
        assert_same_bits(got.grads[name], clean.grads[name], f"grad of {name}")


def test_nan_of_one_sequence_stays_there(target: Target) -> None:
    """Packed neighbours of a sequence of NaN do not notice."""
    case = Case("packed", sequences=((65, 65), (20, 33), (31, 17)), mask=("causal",))
    inputs = build(case)
    rows = torch.ones(sum(m for m, _ in case.sequences or ()), case.heads, case.value_dim)
    sent = Sent(rows, torch.ones(case.heads, len(rows)))
    clean = attend(inputs, target.backend, sent)
    with torch.no_grad():
        inputs.q[65:85] = NAN
        inputs.k[65:98] = NAN
        inputs.v[65:98] = NAN
    got = attend(inputs, target.backend, sent)
    assert bool(got.out[65:85].isnan().all())
    keep_q = torch.tensor([*range(65), *range(85, 116)])
    keep_k = torch.tensor([*range(65), *range(98, 115)])
    assert_same_bits(got.out[keep_q], clean.out[keep_q], "out")
    assert_same_bits(got.lse[:, keep_q], clean.lse[:, keep_q], "lse")
    for name, keep in (("q", keep_q), ("k", keep_k), ("v", keep_k)):
        assert_same_bits(got.grads[name][keep], clean.grads[name][keep], f"grad of {name}")


# An operand, the place of its NaN, and where out and lse are NaN then.
NANS: dict[str, tuple[Any, ...]] = {
    "q": ((0, 1, 37, 5), (0, 1, 37), (0, 1, 37)),
    "k": ((1, 0, 99, 3), (1, 0), (1, 0)),
    "v": ((1, 0, 99, 3), (1, 0, slice(None), 3), None),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("operand", NANS)
def test_a_nan_goes_where_it_is_seen(target: Target, operand: str, dtype: torch.dtype) -> None:
    """One query's into its row, a key's into its head, a value's into its column; no further."""
    inputs = build(Case("nan", queries=70, keys=130, dtype=dtype))
    clean = attend(inputs, target.backend)
    place, out, lse = NANS[operand]
    with torch.no_grad():
        getattr(inputs, operand)[place] = NAN
    got = attend(inputs, target.backend)
    clean.out[out] = NAN
    if lse is not None:
        clean.lse[lse] = NAN
    assert_same_bits(got.out, clean.out, "out")
    assert_same_bits(got.lse, clean.lse, "lse")


def test_nan_bias_at_a_visible_pair(target: Target) -> None:
    """A NaN in the bias reaches its row, as it does in torch."""
    case = Case("nan-bias", score=("bias",))
    inputs = build(case)
    assert inputs.score is not None
    with torch.no_grad():
        inputs.score.captured[0][0, 1, 3, 7] = NAN
    got = attend(inputs, target.backend)
    assert bool(got.out[0, 1, 3].isnan().all())
    got.out[0, 1, 3] = 0
    assert bool(got.out.isfinite().all())


def test_softcap_saturates_quietly(target: Target) -> None:
    """Scores far past the cap: finite out, zero gradients of q and k, no NaN."""
    q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
    q, k = (1e3 * q).requires_grad_(), (1e3 * k).requires_grad_()
    out = tilewise.attention(q, k, v, score=scores.softcap(1.0), backend=target.backend)
    grad_q, grad_k = torch.autograd.grad(out.sum(), (q, k))
    assert all(bool(t.isfinite().all()) for t in (out, grad_q, grad_k))


@only_cpu
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="ARM keeps such results")
def test_results_below_the_normal_range_are_zero(target: Target) -> None:
    """They would cost 150 cycles in each product. What torch computes afterwards keeps its own."""
    # 100 keys away ALiBi leaves e^-100 of a probability: no normal number.
    shapes = ((1, 1, 20, 16), (1, 1, 300, 16), (1, 1, 300, 16))
    q, k, v = (torch.full(shape, 0.5).requires_grad_() for shape in shapes)
    out = tilewise.attention(q, k, v, score=scores.alibi(torch.ones(1)))
    (grad,) = torch.autograd.grad(out.sum(), v)
    least = torch.finfo(torch.float32).tiny
    assert bool(((grad == 0) | (grad.abs() >= least)).all())
    assert bool((grad[0, 0, :150] == 0).all()), "these keys are 130 and more away"
    assert bool((grad[0, 0, 200:] > 0).all()), "and these 80 at most from some query"
    assert bool((torch.full((100,), least) * 0.5 > 0).all())


def test_the_contract_can_fail() -> None:
    """The helper that states the contract tells a wrong result from a right one."""
    truth = torch.randn(3, 4, dtype=torch.float64)
    plain = truth.float()
    assert_exact(plain, plain, truth, "itself")
    wrong = plain.clone()
    wrong[1, 2] += 1e-5
    with pytest.raises(AssertionError, match=r"max error .* at \(1, 2\)"):
        assert_exact(wrong, plain, truth, "wrong")
    wrong[0, 0] = NAN
    with pytest.raises(AssertionError, match="NaN in the wrong places"):
        assert_exact(wrong, plain, truth, "wrong")
    with pytest.raises(AssertionError, match="grad of k: NaN in the wrong places"):
        assert_all_exact((plain, wrong), (plain, plain), (truth, truth), "qk", "grad of ")
    with pytest.raises(AssertionError, match="out, tensor 1: 2 of 12 elements differ"):
        assert_all_same_bits((plain, wrong), (plain, plain), "out")
    with pytest.raises(ValueError, match="argument 2 is longer"):
        assert_all_same_bits((plain,), (plain, plain), "out")
    names = [case.name for case in TABLE]
    assert len(set(names)) == len(names)
    assert replace(TABLE[0], dtype=torch.float16) == TABLE[0].of(torch.float16)
