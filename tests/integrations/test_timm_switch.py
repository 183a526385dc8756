"""What the switch for timm's models takes and refuses, what it counts, and how it is undone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tests.integrations.timm_models import images, made
from tilewise.errors import InvalidType, Unsupported
from tilewise.integrations.timm import disable, enable

pytestmark = pytest.mark.filterwarnings("ignore")  # those of timm


def test_what_is_no_model_of_timm() -> None:
    words = r"(?s)Linear, which has no layer of timm with a fused_attn.*tilewise\.sdpa"
    with pytest.raises(Unsupported, match=words):
        enable(nn.Linear(2, 2))
    model: Any = "vit_tiny_patch16_224"
    for switch in (enable, disable):
        with pytest.raises(InvalidType, match="model: got a str"):
            switch(model)
    assert disable(nn.Linear(2, 2)).calls == 0


class Layer(nn.Module):
    """The least that ``enable`` takes for a layer of timm's, where timm is absent."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn = False
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        if not self.fused_attn:
            return (q @ k.mT / 8**0.5).softmax(-1) @ v
        return nn.functional.scaled_dot_product_attention(q, k, v)


Layer.__module__ = "timm.layers.attention"


def test_a_layer_where_timm_is_absent() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Layer())
    x = torch.randn(2, 5, 8)
    expected = model(x)
    report = enable(model)
    found, copied = model(x), copy.deepcopy(model)(x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(copied, found)
    with tilewise.sdpa():
        model(x)
    assert (report.taken, report.calls, report.layers) == (2, 3, {"Layer": 1})
    assert disable(model) is report
    assert torch.equal(model(x), expected)
    assert type(model[1]) is Layer


def swin_v2() -> Any:
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    sizes = {"img_size": 32, "patch_size": 4, "window_size": 4}
    return SwinTransformerV2(**sizes, embed_dim=16, depths=(2,), num_heads=(2,))


@pytest.mark.usefixtures("timm")
def test_layers_that_compute_weights_themselves() -> None:
    words = r"SwinTransformerV2, .*swin_transformer_v2\.WindowAttention x 2 compute.*themselves"
    with pytest.raises(Unsupported, match=words):
        enable(swin_v2())
    report = enable(nn.ModuleList([made("vit"), swin_v2()]))
    assert (report.layers, report.passed_over) == ({"Attention": 2}, {"WindowAttention": 2})
    assert str(report) == (
        "0 of 0 calls taken\n  layers: Attention x 2\n"
        "  compute weights themselves: WindowAttention x 2"
    )


@pytest.mark.usefixtures("timm")
def test_on_and_off() -> None:
    model = made("swin")
    kinds = [type(each) for each in model.modules()]
    expected = model(images())
    part = enable(model.layers[0])
    assert part.layers == {"WindowAttention": 2}
    report = enable(model)
    assert report is part is enable(model)
    assert report.layers == {"WindowAttention": 4}
    assert "TilewiseWindowAttention" in repr(model)
    model(images())
    assert report.taken == 4
    assert disable(model) is report
    assert torch.equal(model(images()), expected)
    assert [type(each) for each in model.modules()] == kinds
    assert not any(getattr(each, "fused_attn", False) for each in model.modules())
    assert report.taken == 4
    assert disable(model).calls == 0


@pytest.mark.usefixtures("timm")
def test_copies_and_pickles_stay_switched() -> None:
    model = made("vit")
    report = enable(model)
    expected = model(images())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(images()), expected)
    assert report.taken == 4, "a copy counts where the model does"
    read = pickle.loads(pickle.dumps(model))
    assert torch.equal(read(images()), expected)
    own = disable(read)
    assert (own.taken, own.layers, report.taken) == (2, {"Attention": 2}, 4)
    disable(copied)
    assert "Tilewise" not in repr(copied) + repr(read)
    model(images())
    assert report.taken == 6


@pytest.mark.usefixtures("timm")
def test_a_call_that_is_left_to_torch() -> None:
    from timm.models.swin_transformer import SwinTransformer

    sizes = {"img_size": 16, "patch_size": 2, "window_size": 4, "depths": (2,), "num_heads": (1,)}
    model = SwinTransformer(**sizes, embed_dim=16, head_dim=600).eval()
    given = images()[..., :16, :16]
    expected = model(given)
    report = enable(model)
    torch.testing.assert_close(model(given), expected)
    (reason,) = report.left
    assert "D = 600 is over its limit of 576" in reason
    assert (report.taken, report.left[reason]) == (0, 2)


@pytest.mark.parametrize("name", ["vit", "swin"])
@pytest.mark.usefixtures("timm")
def test_together_with_the_switch_of_the_process(name: str) -> None:
    model = made(name)
    expected = model(images())
    own = enable(model)
    with tilewise.sdpa() as report:
        found = model(images())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    calls = {"vit": 2, "swin": 4}[name]
    assert (report.taken, own.taken, own.calls) == (calls, 0, calls)
    assert "another function in the name of F.scaled_dot_product_attention" in str(own)
