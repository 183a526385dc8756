"""The timed cases, their tensors, and the ways that attention is called on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilelab.gpu_check.eight import quantised
from tilelab.gpu_check.flops import (
    backward_flops,
    causal_pairs,
    forward_flops,
    full_pairs,
    window_pairs,
)
from tilelab.gpu_check.setting import Setting, Sizes
from tilewise import BlockMask, masks, scores
from tilewise.inspect.gpu import by_pointers
from tilewise.variants.float8 import NO_SCALES, Scales

__all__ = [
    "POINTERS",
    "Attend",
    "Given",
    "Timed",
    "amount",
    "cases",
    "find",
    "given",
    "other_lengths",
    "ours",
    "plain",
    "visible",
    "with_goals",
]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

POINTERS = "pointers"
PLAIN_KINDS = ("full", "causal")
VARIANTS = ("alibi", "document", "window")
_DECODE_HEADS, _DECODE_KV_HEADS = 32, 8


class Timed(NamedTuple):
    """One problem that is timed.

    Args:
        kind: full, causal, alibi (causal too), document (causal too), window, varlen (causal too),
            decode or fp8.
        head_dim: D.
        length: keys of a sequence; in a varlen case their total.
    """

    kind: str
    head_dim: int
    length: int

    @property
    def name(self) -> str:
        """Names this case alone."""
        return f"D{self.head_dim} {self.kind} {self.length}"

    @property
    def has_backward(self) -> bool:
        """Whether the gradients of the case are timed."""
        return self.kind not in ("decode", "fp8")


class Given(NamedTuple):
    """The tensors of a case.

    Args:
        q, k, v: [B, H, S, D]; packed [T, H, D] for varlen.
        grad: of the output.
        slopes: [H], of ALiBi.
        ids: [N], the document of each position.
        ends: [documents + 1], where documents begin and end.
        window: keys that a row of a window sees, itself among them.
        scales: of float8 q, k and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    slopes: Tensor
    ids: Tensor
    ends: Tensor
    window: int
    scales: Scales = NO_SCALES


def cases(sizes: Sizes) -> list[Timed]:
    """Return every case, those with a goal first."""
    return [*with_goals(sizes), *other_lengths(sizes)]


def with_goals(sizes: Sizes) -> list[Timed]:
    """Return the two greatest lengths, the variants, and what is no square problem.

    One of each kind comes first: time that runs out costs a second width or length.
    """
    longest, second = sizes.lengths[:2]
    width, other = sizes.widths[0], sizes.widths[1:2]
    return [
        *(Timed(kind, each, longest) for each in sizes.widths for kind in PLAIN_KINDS),
        *(Timed(kind, width, sizes.variant_length) for kind in VARIANTS),
        Timed("decode", width, sizes.decode_keys),
        Timed("fp8", width, longest),
        Timed("varlen", width, sizes.tokens),
        *(Timed(kind, each, sizes.variant_length) for each in other for kind in VARIANTS),
        *(Timed(kind, each, second) for each in sizes.widths for kind in PLAIN_KINDS),
    ]


def other_lengths(sizes: Sizes) -> list[Timed]:
    """Shorter lengths, at the same number of tokens."""
    lengths = sizes.lengths[2:]
    return [Timed(k, width, n) for n in lengths for width in sizes.widths for k in PLAIN_KINDS]


def find(sizes: Sizes, name: str) -> Timed:
    """Return the case of that name."""
    return next(case for case in cases(sizes) if case.name == name)


def given(setting: Setting, case: Timed) -> Given:
    """Standard normal numbers; documents of uneven lengths, always the same."""
    sizes, device = setting.sizes, setting.device
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(setting.dtype)

    batch, heads = sizes.tokens // case.length, sizes.hidden // case.head_dim
    if case.kind == "decode":
        batch, heads = sizes.decode_batch, _DECODE_HEADS
        q = draw(batch, heads, 1, case.head_dim)
        k, v = (draw(batch, _DECODE_KV_HEADS, case.length, case.head_dim) for _ in range(2))
        grad = draw(*q.shape)
    elif case.kind == "varlen":
        q, k, v, grad = (draw(case.length, heads, case.head_dim) for _ in range(4))
    else:
        q, k, v, grad = (draw(batch, heads, case.length, case.head_dim) for _ in range(4))
    scales = NO_SCALES
    if case.kind == "fp8":
        (q, of_q), (k, of_k), (v, of_v) = (quantised(x) for x in (q, k, v))
        scales = Scales(of_q, of_k, of_v)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device)
    ends = torch.tensor(_ends(case.length, sizes.documents), dtype=torch.int32, device=device)
    ids = torch.repeat_interleave(torch.arange(len(ends) - 1, device=device), ends.diff())
    return Given(q, k, v, grad, slopes, ids, ends, sizes.window, scales)


def _ends(length: int, mean: int) -> list[int]:
    """0, and where documents end: half of the mean, one and a half of it, and again."""
    ends, long = [0], False
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + (3 * mean // 2 if long else max(1, mean // 2))))
        long = not long
    return ends


def amount(case: Timed, things: Given, backward: bool) -> float:
    """Operations of a pass; of decoding the bytes of keys and values."""
    if case.kind == "decode":
        return float(2 * things.k.numel() * things.k.element_size())
    heads = things.q.shape[-2 if case.kind == "varlen" else 1]
    batch = 1 if case.kind == "varlen" else things.q.shape[0]
    if case.kind in ("full", "fp8"):
        pairs = full_pairs(case.length, case.length)
    elif case.kind == "window":
        pairs = window_pairs(case.length, things.window)
    elif case.kind in ("document", "varlen"):
        pairs = causal_pairs(things.ends.diff().tolist())
    else:
        pairs = causal_pairs([case.length])
    count = backward_flops if backward else forward_flops
    return count(batch * pairs, heads, case.head_dim)


def visible(case: Timed, things: Given) -> Callable[[Any, Any], Any] | None:
    """Return which pairs attend, for integer tensors m and n that broadcast; None if all do."""
    if case.kind in ("full", "fp8", "decode"):
        return None
    if case.kind == "window":
        return lambda m, n: (n <= m) & (m - n < things.window)
    if case.kind in ("document", "varlen"):
        return lambda m, n: (n <= m) & (things.ids[m] == things.ids[n])
    return lambda m, n: n <= m


def ours(setting: Setting, case: Timed, things: Given) -> dict[str, Attend]:
    """Our ways of doing a case: ``ours``, and ``table`` where a BlockMask may serve better.

    ``pointers`` is the forward pass without tensor descriptors, for what these gain.
    """
    backend = setting.backend
    if case.kind == "varlen":
        ends = things.ends
        return {
            "ours": lambda q, k, v: tilewise.attention_varlen(
                q, k, v, ends, ends, mask=masks.causal(), backend=backend
            )
        }
    if case.kind == "fp8":
        q_scale, k_scale, v_scale = things.scales
        return {
            "ours": lambda q, k, v: tilewise.attention(
                q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, backend=backend
            )
        }
    score = scores.alibi(things.slopes) if case.kind == "alibi" else None
    mask: Any = None
    if case.kind in ("causal", "alibi"):
        mask = masks.causal()
    elif case.kind == "window":
        mask = masks.window(things.window - 1, 0)
    elif case.kind == "document":
        mask = masks.document(things.ids) & masks.causal()

    def attend(mask: Any) -> Attend:
        return lambda q, k, v: tilewise.attention(q, k, v, mask=mask, score=score, backend=backend)

    found = {"ours": attend(mask)}
    if case.kind in (*PLAIN_KINDS, "alibi"):
        found[POINTERS] = _by_pointers(attend(mask))
    if case.kind == "document":
        made: list[BlockMask] = []

        def with_table(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not made:
                made.append(BlockMask.of(mask, case.length, dtype=setting.dtype))
            out: Tensor = attend(made[0])(q, k, v)
            return out

        found["table"] = with_table
    return found


def _by_pointers(attend: Attend) -> Attend:
    def without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with by_pointers():
            return attend(q, k, v)

    return without


def plain(case: Timed, things: Given, rows: Tensor | None = None) -> Attend:
    """Attention that writes its matrix, on every row or on those of ``rows`` (then q is cut too).

    q, k and v are [B, H, S, D] and may be of any floating dtype; ``rows`` are int64.
    """
    seen = visible(case, things)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        s = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
        m = (torch.arange(q.shape[2], device=q.device) if rows is None else rows)[:, None]
        n = torch.arange(k.shape[2], device=q.device)
        if case.kind == "alibi":
            s = s - things.slopes[:, None, None].to(s.dtype) * (m - n).abs()
        if seen is not None:
            s = s.masked_fill(~seen(m, n), -math.inf)
        return s.softmax(-1).to(v.dtype) @ v

    return attend
