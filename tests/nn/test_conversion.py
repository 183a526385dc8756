"""nn.convert: what becomes of a model's modules, and that nothing that they hold is lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.drop_in import drawn
from tilewise.errors import InvalidType, SlowPathWarning
from tilewise.nn import (
    Attention,
    MultiheadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    convert,
)

E, H = 16, 4


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=SlowPathWarning)
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        yield


class OwnAttention(nn.MultiheadAttention):
    """A subclass that a user wrote."""


class OwnLayer(nn.TransformerEncoderLayer):
    """Another one."""


class FancyAttention(nn.Module):
    """Attention that is not torch's module, with a part that sounds like it too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_attention = nn.Identity()


def transformer(**options: Any) -> nn.Transformer:
    options = {"dropout": 0.0, "batch_first": True, **options}
    return nn.Transformer(E, H, 2, 2, 20, dtype=torch.float64, **options)


def test_a_transformer_goes_on_as_it_was() -> None:
    """The same numbers and optimizer steps as without; objects stay what they are."""
    made = []
    for converted in (False, True):
        torch.manual_seed(0)
        model = transformer()
        # Not Adam, which would make steps of the rounding of the keys' bias: its gradient is 0.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        before = list(model.named_parameters())
        modules = list(model.modules())
        if converted:
            convert(model, quiet=True)
            assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
            after = list(model.named_parameters())
            assert [name for name, _ in before] == [name for name, _ in after]
            assert all(a[1] is b[1] for a, b in zip(before, after, strict=True))
        x, y = drawn(2, 9, E), drawn(2, 7, E)
        mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=x.dtype)
        for _ in range(3):
            out = model(x, y, tgt_mask=mask)
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
        made.append(model.eval()(x, y, tgt_mask=mask))
    torch.testing.assert_close(made[1], made[0], rtol=1e-10, atol=1e-10)


def test_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    model = transformer()
    found = convert(model)
    assert capsys.readouterr().out == f"{found}\n"
    kinds = [place.kind for place in found.replaced]
    assert kinds.count("TransformerEncoderLayer") == kinds.count("TransformerDecoderLayer") == 2
    assert kinds.count("MultiheadAttention") == 6
    assert not found.left
    assert str(found).splitlines() == [
        "tilewise.nn.convert: 10 replaced, 0 left as they are",
        "  replaced: 2 x TransformerEncoderLayer: encoder.layers.0, encoder.layers.1",
        "  replaced: 6 x MultiheadAttention: encoder.layers.0.self_attn, "
        "encoder.layers.1.self_attn, decoder.layers.0.self_attn, ..., "
        "decoder.layers.1.multihead_attn",
        "  replaced: 2 x TransformerDecoderLayer: decoder.layers.0, decoder.layers.1",
    ]
    ours = (MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer)
    assert all(type(model.get_submodule(place.name)) in ours for place in found.replaced)
    again = convert(model, quiet=True)
    assert not again.replaced
    assert [place.name for place in again.already] == [place.name for place in found.replaced]
    assert capsys.readouterr().out == ""


def test_hooks_flags_and_buffers_stay() -> None:
    module = nn.MultiheadAttention(E, H, dropout=0.3, dtype=torch.float64).eval()
    module.register_buffer("extra", torch.ones(3))
    module.in_proj_weight.requires_grad_(False)
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    x = drawn(5, 2, E)
    wanted = module(x, x, x)[0]
    state = module.state_dict()
    found = convert(module, quiet=True)
    assert [place.name for place in found.replaced] == [""]
    assert type(module) is MultiheadAttention
    assert "(the model)" in str(found)
    torch.testing.assert_close(module(x, x, x)[0], wanted)
    assert seen == ["before", "after"] * 2
    assert not module.training
    assert not module.in_proj_weight.requires_grad
    assert all(torch.equal(state[name], each) for name, each in module.state_dict().items())


def test_what_is_left_is_named_with_the_reason() -> None:
    patched = nn.MultiheadAttention(E, H)
    patched.forward = lambda *args, **keywords: (args[0], None)  # type: ignore[method-assign]
    odd = nn.TransformerEncoderLayer(E, H)
    odd.self_attn = nn.Identity()  # type: ignore[assignment]
    outer = nn.TransformerEncoderLayer(E, H)
    outer.self_attn = OwnAttention(E, H)
    model = nn.ModuleDict(
        {
            "own": OwnAttention(E, H),
            "layer": OwnLayer(E, H),
            "patched": patched,
            "odd": odd,
            "outer": outer,
            "fancy": FancyAttention(),
            "ours": Attention(E, H),
            "linear": nn.Linear(E, E),
        }
    )
    found = convert(model, quiet=True)
    assert [place.name for place in found.replaced] == ["layer.self_attn"]
    assert [place.name for place in found.already] == ["ours"]
    whys = {place.name: place.why for place in found.left}
    assert list(whys) == [
        *("own", "layer", "patched", "odd", "outer", "outer.self_attn", "fancy"),
    ]
    assert "subclass of torch.nn.MultiheadAttention" in whys["own"]
    assert "set_fastpath_enabled(False)" in whys["layer"]
    assert "replaced on the instance" in whys["patched"]
    assert "Identity" in whys["odd"]
    assert "tilewise.sdpa()" in whys["fancy"]
    assert "OwnAttention" in whys["outer"]
    assert "left: 2 x OwnAttention: own, outer.self_attn" in str(found)
    x = torch.ones(3, 2, E)
    assert patched(x, x, x)[0] is x
    assert type(odd) is type(outer) is nn.TransformerEncoderLayer


def test_a_subclass_of_a_layer_computes_by_ours_without_the_fast_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the reason says about torch's fast path is so."""
    model = OwnLayer(E, H, batch_first=True).eval()
    convert(model, quiet=True)
    calls: list[Tensor] = []
    forward = MultiheadAttention.forward

    def watched(self: Any, query: Tensor, *args: Any, **keywords: Any) -> Any:
        calls.append(query)
        return forward(self, query, *args, **keywords)

    monkeypatch.setattr(MultiheadAttention, "forward", watched)
    x = drawn(2, 5, E).float()
    with torch.no_grad():
        fast = model(x)
        assert not calls
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            ours = model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(calls) == 1
    torch.testing.assert_close(ours, fast, rtol=1e-5, atol=1e-5)


def test_weights_can_be_given_up() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(E, H), MultiheadAttention(E, H)])
    x = torch.randn(5, 2, E)
    convert(model, quiet=True)
    assert all(each(x, x, x)[1] is not None for each in model)
    convert(model, drop_weights=True, quiet=True)
    assert all(each(x, x, x)[1] is None for each in model)


def test_a_shared_module_is_replaced_once() -> None:
    shared = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert len(convert(model, quiet=True).replaced) == 1
    assert model["first"] is model["second"] is shared


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, of torch.jit.script
def test_a_scripted_module_is_left() -> None:
    scripted = torch.jit.script(nn.MultiheadAttention(E, H))
    (left,) = convert(scripted, quiet=True).left
    assert "torch.jit.script" in left.why


def test_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    convert(nn.Linear(2, 2))
    assert "no module of attention" in capsys.readouterr().out


def test_no_module() -> None:
    with pytest.raises(InvalidType, match=r"model.*list"):
        convert([nn.MultiheadAttention(E, H)])  # type: ignore[arg-type]
