"""Models of transformers with padding under torch.compile and torch.export: one graph, for any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import tilewise
from tests.integrations.tiny_models import assert_equal_to_float32, both, inputs, noise, tokens
from tilewise.errors import Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]


def padding(ids: Tensor, side: str) -> Tensor:
    """1 for a token, 0 for padding: of the first item on the left, of the last on the right."""
    mask = torch.ones_like(ids)
    if side in ("left", "both"):
        mask[0, : ids.shape[1] // 3] = 0
    if side in ("right", "both"):
        mask[-1, ids.shape[1] // 2 :] = 0
    return mask


def padded(name: str, side: str) -> tuple[dict[str, Any], Tensor]:
    """Inputs of a model, and the rows of its logits that are no padding."""
    given: dict[str, Any] = dict(inputs(name))
    if name == "t5":
        given["attention_mask"] = padding(given["input_ids"], side)
        real = given["decoder_attention_mask"] = padding(given["decoder_input_ids"], side)
        return given, real.bool()
    real = given["attention_mask"] = padding(given["input_ids"], side)
    return given, real.bool()


# gpt-oss is not here: its experts loop over what is in a tensor.
@pytest.mark.parametrize("side", ["both", "none"])
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "bert", "t5", "deepseek_v32", "minimax_m3_vl"]
)
def test_one_graph(name: str, side: str) -> None:
    torch.compiler.reset()
    _, ours = both(name)
    given, real = padded(name, side)
    backend = CompileCounter()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    found = compiled(**given, use_cache=False).logits
    assert backend.frame_count == 1
    assert_equal_to_float32(found[real], ours(**given, use_cache=False).logits[real])


def test_training_in_one_graph() -> None:
    torch.compiler.reset()
    eager, ours = both("llama")
    given, real = padded("llama", "both")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        logits = model(**given, use_cache=False).logits[real]
        (logits * noise(*logits.shape)).sum().backward()
    expected = dict(eager.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in expected.values())
    for name, parameter in ours.named_parameters():
        assert_equal_to_float32(parameter.grad, expected[name].grad, name, least=largest / 10)


def test_one_graph_serves_every_length_and_padding() -> None:
    torch.compiler.reset()
    _, ours = both("mistral")
    backend = CompileCounter()
    compiled = torch.compile(ours, backend=backend, fullgraph=True, dynamic=True)
    for length, side in ((17, "left"), (23, "right"), (9, "both"), (40, "left"), (11, "none")):
        ids = tokens(3, length, seed=length)
        mask = padding(ids, side)
        found = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
        expected = ours(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert_equal_to_float32(found[mask.bool()], expected[mask.bool()])
        assert backend.frame_count == 1, (length, side)


class Logits(torch.nn.Module):
    """A model as a function of tensors, for export."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        """Its logits."""
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    torch.compiler.reset()
    _, ours = both("llama")
    ids = tokens(3, 17)
    length = torch.export.Dim("length", min=4, max=64)
    shapes = {"ids": {1: length}, "mask": {1: length}}
    given = (ids, padding(ids, "left"))
    program = torch.export.export(Logits(ours), given, dynamic_shapes=shapes, strict=strict)
    for size, side in ((17, "left"), (30, "right"), (9, "both")):
        ids = tokens(3, size, seed=size)
        mask = padding(ids, side)
        found, expected = program.module()(ids, mask), Logits(ours)(ids, mask)
        assert_equal_to_float32(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("side", ["left", "right", "both", "none"])
@pytest.mark.parametrize("holes", [False, True])
def test_the_pairs_are_the_same_where_nothing_is_read(side: str, holes: bool) -> None:
    from tilewise.integrations.transformers import make_mask

    mask = padding(torch.ones(3, 12, dtype=torch.int64), side)
    mask[1, 4:6] = 1 - int(holes)
    mask[2] *= int(side != "both")  # nothing is real
    made: list[Any] = []

    def step(mask: Tensor) -> Tensor:
        made.append(make_mask(3, 12, 12, attention_mask=mask))
        return mask + 1

    torch.compiler.reset()
    torch.compile(step, backend="eager", fullgraph=True)(mask)
    read = make_mask(3, 12, 12, attention_mask=mask)
    on_meta = make_mask(3, 12, 12, attention_mask=mask.to("meta"))  # whose values nobody has
    assert on_meta.mask is not None
    text = on_meta.mask.text
    assert text == "band(-1,0,0) below()[0] dense()[1] and and"
    real = mask.bool()
    last = (real * torch.arange(1, 13)).amax(-1)
    unread = tilewise.masks.causal("top_left") & (
        tilewise.masks.lengths(last) & tilewise.masks.dense(real[:, None, None, :])
    )
    assert unread.text == text
    expected = tilewise.visible_pairs(read.mask, 12, 12, batch=3)
    assert torch.equal(tilewise.visible_pairs(unread, 12, 12, batch=3), expected)


def test_weights_are_refused_in_a_compiled_layer() -> None:
    """What transformers' hooks wait for is known there too, though dynamo cannot read it."""
    from transformers.utils import output_capturing

    from tilewise.integrations.transformers import attention_forward

    torch.compiler.reset()
    layer, x = torch.nn.Module(), noise(1, 2, 5, 8)
    compiled = torch.compile(lambda x: attention_forward(layer, x, x, x, None)[0], backend="eager")
    torch.testing.assert_close(compiled(x), attention_forward(layer, x, x, x, None)[0])
    torch.compiler.reset()
    token = output_capturing._active_collector.set({"attentions": []})
    try:
        with pytest.raises(Unsupported, match="output_attentions"):
            compiled(x)
    finally:
        output_capturing._active_collector.reset(token)


def test_a_step_in_a_static_cache() -> None:
    """Its offset is a tensor: while something traces it stays one, and one graph serves all."""
    from tilewise.integrations.transformers import attention_forward, make_mask

    torch.compiler.reset()
    layer = torch.nn.Module()
    q, k, v = noise(2, 4, 1, 8), noise(2, 2, 16, 8, seed=4), noise(2, 2, 16, 8, seed=5)
    real = torch.ones(2, 16, dtype=torch.bool)
    real[0, :3] = False

    def step(q: Tensor, k: Tensor, v: Tensor, offset: Tensor, real: Tensor) -> Tensor:
        mask = make_mask(2, 1, 16, offset, attention_mask=real)
        return attention_forward(layer, q, k, v, mask)[0]

    backend = CompileCounter()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for position in (5, 6, 15):  # the mask knows of no position in its text
        offset = torch.tensor(position)
        found = compiled(q, k, v, offset, real)
        torch.testing.assert_close(found, step(q, k, v, offset, real))
    assert backend.frame_count == 1


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_steps_of_a_model_with_a_static_cache(name: str) -> None:
    """The cache's length, which the mask reads, counts on in place before the layers attend."""
    import transformers

    from tilewise.integrations.transformers import absorb

    torch.compiler.reset()
    eager, ours = both(name)
    if name == "deepseek_v2":
        absorb(ours)
    ids, backend = tokens(2, 14), CompileCounter()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        due = eager(ids, use_cache=False).logits
        ours(ids[:, :11], past_key_values=cache)
        for place in range(11, 14):
            found = compiled(ids[:, place : place + 1], past_key_values=cache).logits
            assert_equal_to_float32(found[:, 0], due[:, place])
    assert backend.frame_count == 1
