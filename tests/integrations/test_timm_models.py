"""Models of timm, switched on, give what timm gives: outputs and gradients by the 2x rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_exact
from tests.integrations.timm_models import MODELS, images, made
from tilewise.compat import sdpa_call
from tilewise.integrations.timm import disable, enable

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of timm
    pytest.mark.usefixtures("timm"),
]


def outcome(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits, and the gradients of all parameters of a loss over them."""
    model.to(dtype).zero_grad()
    logits = model(images(dtype))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    (logits * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    model = made(name)
    plain = outcome(model, torch.float32)
    exact = outcome(model, torch.float64)
    keys = list(model.state_dict())
    report = enable(model.float())
    found = outcome(model, torch.float32)
    assert list(model.state_dict()) == keys
    calls = {"pooled by attention": 3, "differential": 4, "swin": 4}.get(name, 2)
    assert (report.taken, report.calls) == (calls, calls)
    assert found.keys() == plain.keys()
    assert float(plain["logits"].std()) > 0.05, "the test would see nothing"
    learned = ("relative_position_bias_table", "rel_pos.")
    biases = [each for each in found if any(part in each for part in learned)]
    assert len(biases) == {"swin": 4, "beit": 2, "relative": 2}.get(name, 0)
    assert all(float(plain[each].abs().max()) > 1e-3 for each in biases)
    for each, got in found.items():
        assert_exact(got, plain[each], exact[each], f"{name}: {each}")
    disable(model)
    again = outcome(model, torch.float32)
    assert all(torch.equal(again[each], plain[each]) for each in plain), "as it was"


def test_what_swin_captures_is_not_spread_over_the_batch(monkeypatch: Any) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def spy(*tensors: Tensor, **said: Any) -> Any:
        score = said["score"]
        steps = score if isinstance(score, list) else [score]
        seen.append([tuple(each.shape) for step in steps for each in step.captured])
        return tilewise.attention(*tensors, **said)

    monkeypatch.setattr(sdpa_call, "attention", spy)
    model = made("swin")
    enable(model)
    model(images())
    assert seen == [
        [(1, 2, 16, 16)],  # [1, H, N, N], for 2 images of 16 windows
        [(1, 2, 16, 16), (16, 16, 16)],  # and [windows, N, N] where they are shifted
        [(1, 4, 16, 16)],
        [(1, 4, 16, 16), (4, 16, 16)],
    ]


def test_a_mask_of_windows_that_is_not_all_or_nothing() -> None:
    from timm.models.swin_transformer import WindowAttention

    torch.manual_seed(0)
    layer = WindowAttention(16, 2, window_size=3).eval()
    x, mask = torch.randn(8, 9, 16), 3 * torch.randn(4, 9, 9)
    mask[mask > 4] = -100.0
    layer.fused_attn = False
    found = [layer(x, mask)]
    enable(layer)
    found.append(layer(x, mask))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_autocast(name: str) -> None:
    model = made(name)
    with torch.no_grad():
        exact = model.double()(images(torch.float64))
        model.float()
        found = []
        for switched in (False, True):
            if switched:
                enable(model)
            with torch.autocast("cpu", torch.bfloat16):
                found.append(model(images()).double())
    plain_is_off, ours_is_off = (float((x - exact).abs().max()) for x in found)
    assert 0 < ours_is_off <= 2 * plain_is_off


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_compiled(name: str) -> None:
    model = made(name)
    report = enable(model)
    expected = outcome(model, torch.float32)
    calls = report.taken
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits = compiled(images())
    assert report.taken == 2 * calls, "counted when traced"
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-6)
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[path], rtol=1e-4, atol=1e-5)


def test_checkpointing_and_dropout() -> None:
    """Blocks that are computed again in the backward, with the same pairs dropped."""
    model = made("vit")
    report = enable(model)
    for layer in model.modules():
        if hasattr(layer, "attn_drop"):
            layer.attn_drop.p = 0.5
    model.train()
    found = []
    for again in (False, True):
        model.set_grad_checkpointing(again)
        torch.manual_seed(3)
        found.append(outcome(model, torch.float32))
    assert report.taken == 6
    for each, got in found[0].items():
        torch.testing.assert_close(found[1][each], got, rtol=1e-5, atol=1e-6)
    torch.manual_seed(4)
    assert not torch.equal(outcome(model, torch.float32)["logits"], found[0]["logits"])
