"""What a model's attention layers say of their softmax, against the same written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilelab.models import bert
from tilelab.models.gpt2 import GPT2, Shape
from tilelab.models.layers import SelfAttention, pack
from tilelab.study.records.events import LayerSoftmax
from tilelab.study.tasks.scores import look, watched
from tilewise import nn
from tilewise.errors import Unsupported
from tilewise.functional import SoftmaxStats
from tilewise.nn.implementations import Ask, with_weights

SHAPE = Shape(layers=3, heads=2, width=16, context=12, vocabulary=31, kv_heads=1)


def _model(**changes: object) -> GPT2:
    model = GPT2(SHAPE, **changes).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)
    return model


def _tokens(rows: int = 3) -> Tensor:
    return torch.randint(0, 31, (rows, 12), generator=torch.Generator().manual_seed(1))


def _written_out(layer: nn.Attention, x: Tensor) -> LayerSoftmax:
    q = layer._heads(layer.query(x), layer.heads)
    k, v = (layer._heads(each(x), layer.kv_heads) for each in (layer.key, layer.value))
    weights = with_weights(q, k, v, Ask(layer.mask, None, layer.scale, None, 0.0))[1]  # type: ignore[arg-type]
    entropy = torch.special.entr(weights).sum(dim=-1).mean(dim=(0, 2))
    scores = (q @ k.transpose(-2, -1) * layer.scale)[weights > 0]
    return LayerSoftmax(0, entropy.mean().item(), entropy.min().item(), scores.max().item())


def _attentions(model: GPT2) -> list[nn.Attention]:
    return [each for each in model.modules() if isinstance(each, nn.Attention)]


def test_every_layer_says_what_the_written_out_softmax_says() -> None:
    model, inputs = _model(), dict[int, Tensor]()
    for place, attention in enumerate(_attentions(model)):
        attention.register_forward_pre_hook(
            lambda _, args, place=place: inputs.update({place: args[0]})
        )
    with torch.no_grad(), watched(model) as found:
        assert found is not None
        for part in _tokens(5).split(2):  # groups of two, two and one
            model(part)
        layers = found()
    assert all(each.on_statistics is None for each in _attentions(model))
    with torch.no_grad():
        model(_tokens(5))
        expected = [
            _written_out(attention, inputs[place])
            for place, attention in enumerate(_attentions(model))
        ]
    assert [each.layer for each in layers] == [0, 1, 2]
    for mine, theirs in zip(layers, expected, strict=True):
        assert mine.entropy == pytest.approx(theirs.entropy, rel=1e-5)
        assert mine.lowest_head == pytest.approx(theirs.lowest_head, rel=1e-5)
        assert mine.max_logit == pytest.approx(theirs.max_logit, rel=1e-5)
        assert mine.lowest_head < mine.entropy < math.log(12)  # type: ignore[operator]


@pytest.mark.parametrize("implementation", ["plain", "sdpa"])
def test_other_implementations_have_none(implementation: str) -> None:
    with watched(_model(implementation=implementation)) as found:
        assert found is None
    layer = nn.Attention(8, 2, implementation=implementation)  # type: ignore[arg-type]
    layer.on_statistics = lambda _: None
    with pytest.raises(Unsupported, match=f"statistics of implementation '{implementation}'"):
        layer(torch.zeros(1, 3, 8))


def test_a_layer_gives_its_statistics_with_gradients() -> None:
    layer, seen = nn.Attention(8, 2), list[SoftmaxStats]()
    layer.on_statistics = seen.append
    layer(torch.randn(2, 5, 8))
    (stats,) = seen
    assert stats.entropy.shape == stats.max_logit.shape == (2, 2, 5)
    assert stats.entropy.requires_grad
    with watched(layer) as found:
        layer(torch.randn(1, 3, 8))
        assert found is not None
        assert len(found()) == 1


def test_a_bert_says_it_of_its_own_sequences() -> None:
    shape = bert.Shape(layers=2, heads=2, width=16, context=12, vocabulary=31)
    model = bert.BERT(shape).eval()
    packed = pack([[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]])
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            torch.nn.init.zeros_(layer.query.weight)
    with torch.no_grad():
        before = model(packed)
        found = look(model, [(packed,)])
        assert torch.equal(model(packed), before)
    assert found is not None
    # Even weights of 3 and of 7 keys: the mean over ten tokens.
    even = (3 * math.log(3) + 7 * math.log(7)) / 10
    assert [each.layer for each in found] == [0, 1]
    assert [each.entropy for each in found] == pytest.approx([even, even], rel=1e-6)
    assert [each.max_logit for each in found] == [0.0, 0.0]
    model = bert.BERT(shape, implementation="sdpa").eval()
    assert look(model, [(packed,)]) is None
