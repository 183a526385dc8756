"""The processor of docs/model-libraries.md in a layer that calls it as diffusers 0.42 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.blocks import block_of, run
from tests.contract import assert_exact


class Layer(nn.Module):
    """What diffusers' ``Attention`` has of a transformer block: projections and a processor."""

    processor: Any

    def __init__(self, cross: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.inner_dim, self.scale = 4, 32, 0.3
        self.group_norm = self.spatial_norm = self.norm_cross = self.norm_q = self.norm_k = None
        self.residual_connection, self.rescale_output_factor = False, 1.0
        self.to_q = nn.Linear(24, 32, bias=False)
        self.to_k, self.to_v = (nn.Linear(cross, 8 * kv_heads, bias=False) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(32, 24), nn.Dropout(0.0)])

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        return self.processor(
            self,
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=attention_mask,
            **cross_attention_kwargs,
        )


class Plain:
    """With the weights written out, one head for each of query's."""

    def __call__(
        self,
        attn: Layer,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            x.unflatten(-1, (-1, 8)).transpose(1, 2)
            for x in (attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source))
        )
        k, v = (x.repeat_interleave(attn.heads // x.shape[1], 1) for x in (k, v))
        logits = attn.scale * q @ k.mT
        if attention_mask is not None:
            logits = logits + attention_mask.repeat_interleave(attn.heads, 0).view(
                len(q), attn.heads, -1, k.shape[2]
            )
        out = logits.softmax(-1) @ v
        return attn.to_out[0](out.transpose(1, 2).reshape(len(q), -1, attn.inner_dim))


def documented() -> Any:
    """The class, and that it is as short as the page says."""
    block = block_of("docs/model-libraries.md", 6)
    names = run([block], {})
    body = block.code[block.code.index("class ") :].strip().splitlines()
    assert len(body[:-1]) == 10  # the last line says that it has run
    return names["TilewiseProcessor"]()


@pytest.mark.parametrize("mask", ["none", "of keys", "of pairs"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_the_documented_processor(kind: str, mask: str) -> None:
    torch.manual_seed(0)
    layer = Layer(cross=24 if kind == "self" else 20, kv_heads=4 if kind == "self" else 2)
    given: dict[str, Tensor] = {"hidden_states": torch.randn(2, 17, 24)}
    keys = 17
    if kind == "cross":
        keys = 11
        given["encoder_hidden_states"] = torch.randn(2, keys, 20)
    if mask != "none":
        rows = 1 if mask == "of keys" else 17
        given["attention_mask"] = -10000.0 * (torch.rand(2, rows, keys) < 0.3)
    ours, plain = documented(), Plain()
    found = []
    for processor, dtype in ((ours, torch.float32), (plain, torch.float32), (plain, torch.float64)):
        layer.to(dtype).zero_grad()
        layer.set_processor(processor)
        out = layer(**{name: x.to(dtype) for name, x in given.items()})
        out.square().sum().backward()
        found.append([out.detach(), *[p.grad for p in layer.parameters() if p.grad is not None]])
    assert len(found[0]) == 6
    for each, (got, expected, exact) in enumerate(zip(*found, strict=True)):
        assert_exact(got, expected, exact, f"{kind}, {mask}: {each}")
