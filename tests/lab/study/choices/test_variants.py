"""Variants: what tilewise's attention is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lab.study.records_of import known
from tilelab.study.ask.config import RunConfig, Variant, change
from tilelab.study.ask.values import names
from tilelab.study.choices import variants
from tilewise import BlockMask, masks, nn, scores
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


def test_a_window_of_one_sees_itself() -> None:
    layer = nn.Attention(8, 2, mask=build(name="window", size=1).mask, implementation="plain")
    x = torch.randn(1, 5, 8)
    assert torch.allclose(layer(x), layer.output(layer.value(x)), atol=1e-6)


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


@pytest.mark.parametrize(
    ("name", "most"), [("window-global", 0.12), ("blocks", 0.08), ("bigbird", 0.3)]
)
def test_a_pattern_leaves_tiles_out(name: str, most: float) -> None:
    """What tilewise saves: tiles in which nobody is seen; half of them even a causal mask has."""
    mask = whole(build(name=name, context=4096), 4096)
    assert BlockMask.of(mask, 4096, heads=2).density < most
    assert BlockMask.of(masks.causal(), 4096).density > 0.5


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
