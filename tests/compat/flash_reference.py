"""What flash-attn's documentation says, in plain torch, in any dtype, with the whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests import plain


class Flags(NamedTuple):
    """The flags of a call, under flash-attn's names."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""
    softmax_scale: float | None = None


def slopes_of(flags: Flags, batch: int, heads: int) -> Tensor | None:
    """ALiBi slopes, float32: "1-D" [H], "2-D" [B, H], "" none."""
    if not flags.alibi:
        return None
    slopes = torch.rand(batch, heads, generator=torch.Generator().manual_seed(3)) * 0.3
    return slopes[0] if flags.alibi == "1-D" else slopes


def seen_of(rows: int, keys: int, flags: Flags) -> Tensor:
    """Which pairs attend, bool [M, N]."""
    own = torch.arange(rows)[:, None] + keys - rows
    n = torch.arange(keys)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    left, right = flags.window_size
    if left >= 0:
        seen &= n >= own - left
    if right >= 0:
        seen &= n <= own + right
    if flags.causal:
        seen &= n <= own
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Flags,
    slopes: Tensor | None,
    dtype: torch.dtype,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out [B, M, Hq, Dv], lse [B, Hq, M] (+inf for no keys), probabilities [B, Hq, M, N]."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    seen = seen_of(q.shape[2], k.shape[2], flags)
    later = k.shape[2] - q.shape[2]

    def score(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if flags.softcap > 0:
            s = flags.softcap * torch.tanh(s / flags.softcap)
        if slopes is None:
            return s
        return s - slopes.to(dtype)[..., None, None] * (m + later - n).abs().to(dtype)

    rows = plain.attend(q, k, v, scale=flags.softmax_scale, score=score, mask=lambda *_: seen)
    out, lse = rows.out, rows.lse.masked_fill(rows.lse == -torch.inf, torch.inf)
    if kept is not None:
        p = torch.where(kept, rows.p / (1 - dropout_p), 0.0)
        out = p @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out.transpose(1, 2), lse, rows.p


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[tuple[int, int]],
    flags: Flags,
    slopes: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Out [Tq, Hq, Dv] and lse [Hq, Tq] of packed sequences."""
    outs, lses, m, n = [], [], 0, 0
    for b, (rows, keys) in enumerate(lengths):
        own = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        one = (q[None, m : m + rows], k[None, n : n + keys], v[None, n : n + keys])
        out, lse, _ = attend(*one, flags, own, dtype)
        outs.append(out[0])
        lses.append(lse[0])
        m, n = m + rows, n + keys
    return torch.cat(outs), torch.cat(lses, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rows [B, S, H, D] turned by tables [B, S, R/2] or [S, R/2], as complex numbers, float64."""
    half = cos.shape[-1]
    turn = torch.complex(cos.double(), sin.double())[..., None, :]
    wide = x.double()
    if interleaved:
        pairs = torch.complex(wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]) * turn
        turned = torch.view_as_real(pairs).flatten(-2)
    else:
        pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * turn
        turned = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([turned, wide[..., 2 * half :]], -1)
