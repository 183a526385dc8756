"""Small calls that the engine's tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tilewise
from tilewise import masks, scores

Attend = Callable[..., Any]


def qkv(
    grad: bool = True, dtype: torch.dtype = torch.float32, swapped: bool = False
) -> list[Tensor]:
    """q [2, 4, 5, 8], k [2, 2, 7, 8], v [2, 2, 7, 6]; swapped: [B, S, H, D] memory."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)):
        tensor = torch.randn(shape, generator=generator).to(dtype)
        if swapped:
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        found.append(tensor.requires_grad_(grad))
    return found


def packed(grad: bool = True) -> list[Tensor]:
    """q [6, 4, 8], k and v [9, 2, 8], then cu_seqlens of two sequences (4 and 2, 5 and 4 rows)."""
    generator = torch.Generator().manual_seed(8)
    found = [
        torch.randn(shape, generator=generator).requires_grad_(grad)
        for shape in ((6, 4, 8), (9, 2, 8), (9, 2, 8))
    ]
    return [*found, torch.tensor([0, 4, 6]), torch.tensor([0, 5, 9], dtype=torch.int32)]


class Sample(NamedTuple):
    """A function of tensors that calls attention, and its arguments."""

    call: Attend
    arguments: list[Tensor]


def _normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def _everything(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **keywords: Any) -> Tensor:
    lengths, bias, sinks = rest
    result = tilewise.attention(
        q,
        k,
        v,
        mask=masks.causal() & masks.lengths(lengths),
        score=[scores.softcap(4.0), scores.bias(bias), scores.alibi(torch.tensor([0.5] * 4))],
        sinks=sinks,
        scale=q.shape[-1] ** -0.5,
        return_lse=True,
        return_stats=True,
        **keywords,
    )
    live = torch.where(result.lse > -1e30, result.lse, 0.0)
    return result.out * live[..., None]


def _statistics(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **keywords: Any) -> Tensor:
    (sinks,) = rest
    result = tilewise.attention(
        q, k, v, mask=masks.causal(), sinks=sinks, return_stats="top1", **keywords
    )
    stats = result.stats
    found = result.out * stats.entropy[..., None]
    return found + (stats.lse + stats.max_logit * stats.top1)[..., None]


def samples() -> dict[str, Sample]:
    """By name: what the traced paths are compared on with the eager one."""
    lengths = torch.tensor([3, 7])
    closed_over = masks.window(3, 1) & ~masks.prefix(1)
    return {
        "plain": Sample(tilewise.attention, qkv()),
        "no gradient": Sample(tilewise.attention, qkv(grad=False)),
        "swapped": Sample(tilewise.attention, qkv(swapped=True)),
        "bfloat16": Sample(tilewise.attention, qkv(dtype=torch.bfloat16)),
        "everything": Sample(_everything, [*qkv(), lengths, _normal(4, 1, 7), _normal(4)]),
        "statistics": Sample(_statistics, [*qkv(), _normal(4)]),
        "statistics in bfloat16": Sample(_statistics, [*qkv(dtype=torch.bfloat16), _normal(4)]),
        "statistics of packed ones": Sample(
            lambda *tensors, **rest: (
                tilewise.attention_varlen(*tensors, return_stats=True, **rest).stats.entropy
            ),
            packed(),
        ),
        "boolean mask": Sample(
            lambda q, k, v, m, **rest: tilewise.attention(q, k, v, mask=m, **rest),
            [*qkv(), torch.arange(35).reshape(5, 7) % 3 > 0],
        ),
        "mask from outside": Sample(
            lambda q, k, v, **rest: tilewise.attention(q, k, v, mask=closed_over, **rest), qkv()
        ),
        "dropout": Sample(
            lambda q, k, v, **rest: tilewise.attention(q, k, v, dropout_p=0.4, **rest), qkv()
        ),
        "dropout with a seed": Sample(
            lambda q, k, v, **rest: tilewise.attention(
                q, k, v, dropout_p=0.4, seed=2**64 - 3, **rest
            ),
            qkv(),
        ),
        "varlen": Sample(
            lambda *tensors, **rest: tilewise.attention_varlen(
                *tensors, mask=masks.causal(), score=scores.alibi(torch.ones(4)), **rest
            ),
            packed(),
        ),
    }


def run(call: Attend, arguments: list[Tensor], **keywords: Any) -> list[Tensor]:
    """Output and gradients of a call, from a fixed state of torch's generator."""
    fresh = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in arguments]
    torch.manual_seed(11)
    out = call(*fresh, **keywords)
    wanted = [tensor for tensor in fresh if tensor.requires_grad]
    if not wanted:
        return [out]
    return [out.detach(), *torch.autograd.grad(out.float().sin().sum(), wanted)]


class Block(nn.Module):
    """One pre-norm transformer block of width 16."""

    def __init__(self, backend: str, dropout: float) -> None:
        super().__init__()
        self.backend, self.dropout = backend, dropout
        self.norm, self.project = nn.LayerNorm(16), nn.Linear(16, 48)
        self.out, self.feed = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        heads = self.project(self.norm(x)).view(batch, rows, 3, 2, 8)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = tilewise.attention(
            q,
            k,
            v,
            mask=masks.causal(),
            score=scores.softcap(20.0),
            dropout_p=self.dropout,
            backend=self.backend,
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, rows, width))
        return x + nn.functional.gelu(self.feed(x))


def transformer(backend: str, dropout: float = 0.0) -> nn.Sequential:
    """Two blocks with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(Block(backend, dropout), Block(backend, dropout))
