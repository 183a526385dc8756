"""tilewise as torch's flash implementation: the numbers, the gradients, and torch as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.compat.extended import attend
from tests.contract import assert_all_exact
from tilewise.compat import flash_impl, sdpa

scaled_dot_product_attention: Any = torch.nn.functional.scaled_dot_product_attention

SEEN = torch.rand(33, 40, generator=torch.Generator().manual_seed(1)) > 0.5
SEEN[3] = False
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": SEEN},
    "float": {"attn_mask": torch.zeros(33, 40).masked_fill(~SEEN, -torch.inf)},
}


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The implementation is active; the list says which of its kernels ran."""
    ran: list[str] = []
    for name in ("_forward_cpu", "_backward_cpu"):
        kernel = getattr(flash_impl, name)

        def counted(*args: Any, _kernel: Any = kernel, _name: str = name, **keywords: Any) -> Any:
            ran.append(_name)
            return _kernel(*args, **keywords)

        monkeypatch.setattr(flash_impl, name, counted)
    attention.activate_flash_attention_impl("tilewise")
    yield ran
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def tensors(key_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 4, 33, 16), (2, key_heads, 40, 16), (2, key_heads, 40, 16))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def outcome(qkv: list[Tensor], backend: SDPBackend, **keywords: Any) -> list[Tensor]:
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*qkv, **keywords)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out, *torch.autograd.grad(out, qkv, weights)]


def check(qkv: list[Tensor], **keywords: Any) -> None:
    found = outcome(qkv, SDPBackend.FLASH_ATTENTION, **keywords)
    plain = outcome(qkv, SDPBackend.MATH, **keywords)
    weights = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(3))
    truth = attend(qkv, keywords.get("attn_mask"), weights, keywords)
    assert_all_exact(found, plain, truth, "oqkv")


@pytest.mark.parametrize("name", CALLS)
def test_torchs_flash_path_is_ours(active: list[str], name: str) -> None:
    check(tensors(), **CALLS[name])
    assert active == ["_forward_cpu", "_backward_cpu"]


def test_grouped_heads(active: list[str]) -> None:
    check(tensors(2), enable_gqa=True)
    assert active == ["_forward_cpu", "_backward_cpu"]


def test_compiled(active: list[str]) -> None:
    qkv = tensors()
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = compiled(*qkv, is_causal=True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    found = [out, *torch.autograd.grad(out, qkv, weights)]
    torch.testing.assert_close(found, outcome(qkv, SDPBackend.MATH, is_causal=True))
    assert "_forward_cpu" in active


def test_torch_is_afterwards_what_it_was() -> None:
    assert sdpa.scaled_dot_product_attention is not scaled_dot_product_attention
    assert "tilewise" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    qkv = tensors()
    before = outcome(qkv, SDPBackend.FLASH_ATTENTION)
    for _ in range(2):
        attention.activate_flash_attention_impl("tilewise")
        assert attention.current_flash_attention_impl() == "tilewise"
        attention.restore_flash_attention_impl()
    for got, want in zip(outcome(qkv, SDPBackend.FLASH_ATTENTION), before, strict=True):
        assert torch.equal(got, want)
