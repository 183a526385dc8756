"""Variants: what tilewise's attention is asked for.

Schedules: their ends, their forms, and that they stay in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.study.records_of import known
from tilelab.study.ask.config import RunConfig, Schedule, Variant, change
from tilelab.study.ask.values import names
from tilelab.study.choices import variants
from tilelab.study.choices.schedules import factor
from tilewise import masks, nn, scores
from tilewise.errors import InvalidArgument
from tilewise.functional import visible_pairs

CPU = torch.device("cpu")


def build(heads: int = 2, context: int = 9, **values: Any) -> variants.Variation:
    return variants.build(Variant.model_validate(values), variants.Heads(heads, CPU, context))


def whole(variation: variants.Variation, length: int) -> masks.Mask:
    """The mask of a call of that many positions."""
    return variation.mask & (variation.pattern(length) if variation.pattern else masks.Mask(()))


def test_causal_window_and_softcap_are_masks_and_scores() -> None:
    causal, window = build(name="causal"), build(name="window", size=16)
    assert (causal.mask.program, causal.score) == (masks.causal().program, None)
    assert (window.mask.program, window.score) == (masks.window(15, 0).program, None)
    mask, score, _ = build(name="softcap", cap=20)
    assert mask.program == masks.causal().program
    assert known(score).program == scores.softcap(20.0).program


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_has_the_slopes_of_the_paper(heads: int, slopes: list[float]) -> None:
    assert variants.alibi_slopes(heads) == slopes
    score = build(heads=heads, name="alibi").score
    (captured,) = known(score).captured
    assert captured.dtype == torch.float32
    assert captured.tolist() == slopes


PATTERNS: list[tuple[dict[str, object], Callable[[int, int], bool]]] = [
    ({"name": "window-global", "size": 3, "tokens": 2}, lambda m, n: m - n < 3 or n < 2),
    ({"name": "dilated", "size": 3, "dilation": 4}, lambda m, n: m - n in (0, 4, 8)),
    ({"name": "blocks", "size": 5}, lambda m, n: m // 5 == n // 5),
    ({"name": "strided", "stride": 4}, lambda m, n: m - n < 4 or (m - n) % 4 == 0),
    ({"name": "fixed", "stride": 4, "summary": 1}, lambda m, n: m // 4 == n // 4 or n % 4 == 3),
    ({"name": "butterfly", "block": 2}, lambda m, n: (m // 2 ^ n // 2).bit_count() <= 1),
]


@pytest.mark.parametrize(
    ("values", "rule"), PATTERNS, ids=lambda each: each["name"] if isinstance(each, dict) else ""
)
@pytest.mark.parametrize("causal", [True, False])
def test_patterns_by_hand(
    values: dict[str, object], rule: Callable[[int, int], bool], causal: bool
) -> None:
    variant = Variant.model_validate(values)
    if not causal and variant.name not in variants.ENCODER:
        assert variant.name in ("strided", "fixed")
        return
    variation = variants.build(variant, variants.Heads(2, CPU, 17, causal))
    found = visible_pairs(whole(variation, 17), 17, 17, heads=2)[0, 0]
    expected = [
        [rule(max(m, n), min(m, n)) and (n <= m or not causal) for n in range(17)]
        for m in range(17)
    ]
    assert found.tolist() == expected


def test_bigbird_sees_its_window_the_first_block_and_what_it_drew() -> None:
    numbers = {"block": 4, "window": 3, "globals": 1, "random": 2}
    options: dict[str, Any] = {"name": "bigbird", **numbers}
    mask = whole(build(context=64, **options), 64)
    found = visible_pairs(mask, 64, 64, heads=2)[0]
    m, n = torch.arange(64)[:, None], torch.arange(64)
    causal, block = n <= m, (m // 4 - n // 4)
    assert not (found & ~causal).any()
    fixed = causal & ((block <= 1) | (n // 4 == 0))
    assert (found | ~fixed).all()
    drawn = found[:, 60:, ::4] & ~fixed[60:, ::4]
    assert 0 < drawn[:, 0].sum() <= 4  # two blocks in each of two heads, or where the others are
    assert not torch.equal(found[0], found[1])
    again = visible_pairs(whole(build(context=64, **options), 64), 64, 64, heads=2)[0]
    assert torch.equal(found, again)
    mask = whole(build(context=64, **options), 40)  # a model may be asked for less than it can
    shorter = visible_pairs(mask, 40, 40, heads=2)[0]
    assert torch.equal(shorter, found[:, :40, :40])


@pytest.mark.parametrize("name", [each for each in variants.ENCODER if each != "full"])
def test_an_encoder_looks_both_ways(name: str) -> None:
    """What a language model sees is what an encoder sees, without what is to come."""
    size = {"block": 8} if name in ("bigbird", "butterfly") else {"size": 3}
    variant = Variant.model_validate({"name": name, **size})
    both, causal = (
        whole(variants.build(variant, variants.Heads(2, CPU, 96, looks_back)), 96)
        for looks_back in (False, True)
    )
    seen_by_both = visible_pairs(both, 96, 96, heads=2)
    assert torch.equal(seen_by_both.tril(), visible_pairs(causal, 96, 96, heads=2))
    assert seen_by_both.triu(1).any()
    if name != "bigbird":
        assert torch.equal(seen_by_both, seen_by_both.mT)


@pytest.mark.parametrize("name", names("variant"))
def test_every_implementation_that_can_gives_one_result(name: str) -> None:
    variation = build(name=name)
    mask, score = whole(variation, 9), variation.score
    torch.manual_seed(0)
    layer = nn.Attention(16, 2, mask=mask, score=score, implementation="plain")
    x = torch.randn(2, 9, 16)
    plain = layer(x)
    for implementation in ("tilewise",) if name == "softcap" else ("tilewise", "sdpa"):
        layer.implementation = implementation  # type: ignore[assignment]
        assert torch.allclose(layer(x), plain, atol=1e-5), implementation
    changed = x.clone()
    changed[:, -1] += 1.0
    causal = torch.equal(layer(changed)[:, :-1], layer(x)[:, :-1])
    assert causal is (name != "full")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "window", "size": 0}, r"variant\.size: got 0"),
        ({"name": "softcap", "cap": 0}, r"variant\.cap: got 0"),
        ({"name": "bigbird", "window": 2}, r"window: got 2.*odd number of blocks"),
        ({"name": "fixed", "stride": 8, "summary": 9}, r"summary: got 9.*at most stride, 8"),
        ({"name": "window-globl"}, r"Did you mean 'window-global'\?"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        change(RunConfig(), {"attention.variant": values})


NAMES = names("schedule")
WARMUPS = st.floats(0.0, 0.79)
STEPS = st.integers(1, 200)


def rates(name: str, steps: int, **options: Any) -> list[float]:
    schedule = Schedule.model_validate({"name": name, **options})
    return [factor(schedule, step, steps) for step in range(steps)]


@given(st.sampled_from(NAMES), STEPS, WARMUPS)
def test_every_factor_is_a_share_and_the_full_rate_is_reached_once_warm(
    name: str, steps: int, warmup: float
) -> None:
    values = rates(name, steps, warmup=warmup)
    ramp = min(round(warmup * steps), steps - 1)
    assert all(0.0 <= value <= 1.0 for value in values)
    assert values[ramp] == 1.0
    assert values[: ramp + 1] == sorted(values[: ramp + 1])
    assert values[ramp:] == sorted(values[ramp:], reverse=True)


@given(st.sampled_from([name for name in NAMES if name != "one-cycle"]), STEPS, WARMUPS)
def test_warmup_is_a_straight_line_that_wastes_no_step(
    name: str, steps: int, warmup: float
) -> None:
    ramp = min(round(warmup * steps), steps - 1)
    expected = [(step + 1) / (ramp + 1) for step in range(ramp)]
    assert rates(name, steps, warmup=warmup)[:ramp] == expected


def test_linear_goes_down_in_equal_parts_to_zero_after_the_last_step() -> None:
    assert rates("linear", 5, warmup=0.0) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates("linear", 10, warmup=0.2) == pytest.approx(
        [1 / 3, 2 / 3, *(1 - k / 8 for k in range(8))]
    )


def test_cosine_is_halfway_in_the_middle_and_ends_at_its_floor() -> None:
    values = rates("cosine", 1000, warmup=0.0, floor=0.2)
    assert values[500] == pytest.approx(0.6)
    assert values[250] == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert 0.2 < values[-1] < 0.2 + 1e-4


@given(STEPS, WARMUPS, st.sampled_from(["sqrt", "linear"]))
def test_wsd_is_flat_and_then_decays(steps: int, warmup: float, shape: str) -> None:
    values = rates("wsd", steps, warmup=warmup, decay=0.2, shape=shape)
    ramp = min(round(warmup * steps), steps - 1)
    decay = min(round(0.2 * steps), steps - ramp)
    assert set(values[ramp : steps - decay]) <= {1.0}
    assert set(rates("constant", steps, warmup=warmup)[ramp:]) == {1.0}
    tail = [k / decay for k in range(decay)]
    expected = [1.0 - (math.sqrt(y) if shape == "sqrt" else y) for y in tail]
    assert values[steps - decay :] == pytest.approx(expected)


@given(st.sampled_from(["constant", "linear", "cosine"]), STEPS, st.integers(1, 250))
def test_a_warmup_of_steps_is_that_of_the_share_that_gives_as_many(
    name: str, steps: int, ramp: int
) -> None:
    share = min(ramp, steps - 1) / steps
    assert rates(name, steps, warmup_steps=ramp, warmup=0.7) == rates(name, steps, warmup=share)


def test_runs_of_different_lengths_share_their_trunk() -> None:
    short, long = (rates("wsd", steps, warmup_steps=10, decay=0.25) for steps in (40, 400))
    assert short[:30] == long[:30]
    for name in ("constant", "linear", "cosine"):
        short, long = (rates(name, steps, warmup_steps=10) for steps in (11, 400))
        assert short[:11] == long[:11]
    # A decay does not begin before the warm-up ends, however long that is.
    values = rates("wsd", 20, warmup_steps=12, decay=0.9, shape="linear")
    assert values == [(t + 1) / 13 for t in range(12)] + [1.0 - y / 8 for y in range(8)]


def test_inverse_sqrt_halves_when_the_steps_are_four_times_as_many() -> None:
    values = rates("inverse-sqrt", 100, warmup=0.09)
    assert values[9] == 1.0
    assert values[39] == pytest.approx(0.5)
    assert rates("inverse-sqrt", 9, warmup=0.0)[8] == pytest.approx(1 / 3)


def test_one_cycle_starts_and_ends_low() -> None:
    values = rates("one-cycle", 1000, warmup=0.25, start=0.1, end=0.02)
    assert values[0] == pytest.approx(0.1)
    assert values[125] == pytest.approx(0.55)
    assert values[250] == 1.0
    assert values[625] == pytest.approx(0.51)
    assert values[-1] == pytest.approx(0.02, abs=1e-4)


@pytest.mark.parametrize(("step", "steps"), [(-1, 5), (5, 5), (0, 0)])
def test_a_step_outside_the_run_is_refused(step: int, steps: int) -> None:
    with pytest.raises(InvalidArgument, match="step"):
        factor(Schedule(name="linear"), step, steps)


def test_warmup_and_decay_fit_into_the_run() -> None:
    wsd = {"name": "wsd", "warmup": 0.5, "decay": 0.6}
    with pytest.raises(InvalidArgument, match=r"schedule\.decay: got 0\.6 with warmup 0\.5"):
        change(RunConfig(), {"schedule": wsd})
    with pytest.raises(InvalidArgument, match=r"schedule\.shape: got 'cube'"):
        change(RunConfig(), {"schedule": {"name": "wsd", "shape": "cube"}})
