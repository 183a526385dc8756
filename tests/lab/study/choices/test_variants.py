"""Variants: what tilewise's attention is asked for."""

from __future__ import annotations

import pytest
import torch

from tilewise import masks, nn, scores
from tilewise.errors import InvalidArgument
from tilewise.lab.study.choices import variants
from tilewise.lab.study.choices.registry import names
from tilewise.lab.study.config import RunConfig, Variant, change

CPU = torch.device("cpu")


def build(heads: int = 2, **values: object) -> variants.Variation:
    return variants.build(Variant.model_validate(values), heads, CPU)


def test_causal_and_window_are_masks() -> None:
    causal, window = build(name="causal"), build(name="window", size=16)
    assert (causal.mask.program, causal.score) == (masks.causal().program, None)
    assert (window.mask.program, window.score) == (masks.window(15, 0).program, None)


def test_a_window_of_one_sees_itself() -> None:
    layer = nn.Attention(8, 2, mask=build(name="window", size=1).mask, implementation="plain")
    x = torch.randn(1, 5, 8)
    assert torch.allclose(layer(x), layer.output(layer.value(x)), atol=1e-6)


def test_softcap_is_a_score() -> None:
    mask, score = build(name="softcap", cap=20)
    assert mask.program == masks.causal().program
    assert score is not None
    assert score.program == scores.softcap(20.0).program


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
    assert score is not None
    (captured,) = score.captured
    assert captured.dtype == torch.float32
    assert captured.tolist() == slopes


@pytest.mark.parametrize("name", names("variant"))
def test_every_implementation_that_can_gives_one_result(name: str) -> None:
    mask, score = build(name=name)
    torch.manual_seed(0)
    layer = nn.Attention(16, 2, mask=mask, score=score, implementation="plain")
    x = torch.randn(2, 9, 16)
    plain = layer(x)
    for implementation in ("tilewise",) if name == "softcap" else ("tilewise", "sdpa"):
        layer.implementation = implementation  # type: ignore[assignment]
        assert torch.allclose(layer(x), plain, atol=1e-5), implementation
    changed = x.clone()
    changed[:, -1] += 1.0
    assert torch.equal(layer(changed)[:, :-1], layer(x)[:, :-1])  # all are causal


@pytest.mark.parametrize("values", [{"name": "window", "size": 0}, {"name": "softcap", "cap": 0}])
def test_values_out_of_bounds_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=r"variant\.(size|cap): got 0"):
        change(RunConfig(), {"attention.variant": values})
