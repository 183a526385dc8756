"""The timed cases, their tensors and operations, and the ways that attention is called on them.

Forward there are two products, ``q k^T`` and ``p v``: 2 D + 2 Dv operations for a visible pair of
query and key. Backward there are five (the scores again, dP, dV, dK, dQ), 2.5 times that whatever
a kernel does twice. A causal mask shows half of all pairs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilelab.common.torch_private import keep_buffers
from tilelab.gpu_check.outcomes import quantised
from tilelab.gpu_check.record import FLEX
from tilelab.gpu_check.setting import Setting, Sizes
from tilewise import BlockMask, masks, scores
from tilewise.inspect.gpu import by_pointers
from tilewise.variants.float8 import NO_SCALES, Scales

__all__ = [
    "POINTERS",
    "Attend",
    "Tensors",
    "Timed",
    "amount",
    "backward_flops",
    "cases",
    "causal_pairs",
    "find",
    "flex",
    "forward_flops",
    "full_pairs",
    "given",
    "other_lengths",
    "ours",
    "peers",
    "plain",
    "visible",
    "window_pairs",
    "with_goals",
]


def full_pairs(queries: int, keys: int) -> float:
    """Return the number of all pairs."""
    return float(queries * keys)


def causal_pairs(lengths: Iterable[int]) -> float:
    """Half the pairs of each square problem."""
    return sum(length * length for length in lengths) / 2


def window_pairs(length: int, width: int) -> float:
    """Row m sees itself and the ``width - 1`` keys before it, as far as there are any."""
    ramp = min(width, length)
    return ramp * (ramp + 1) / 2 + (length - ramp) * float(ramp)


def forward_flops(pairs: float, heads: int, head_dim: int, value_dim: int | None = None) -> float:
    """Operations of the forward pass.

    Args:
        pairs: visible pairs of one head, over the whole batch.
        heads: query heads.
        head_dim: D.
        value_dim: Dv; D if None.
    """
    return 2 * pairs * heads * (head_dim + (head_dim if value_dim is None else value_dim))


def backward_flops(pairs: float, heads: int, head_dim: int) -> float:
    """Operations of the backward pass: five products, 2.5 times the forward pass."""
    return 2.5 * forward_flops(pairs, heads, head_dim)


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


class Tensors(NamedTuple):
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


def given(setting: Setting, case: Timed) -> Tensors:
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
    return Tensors(q, k, v, grad, slopes, ids, ends, sizes.window, scales)


def _ends(length: int, mean: int) -> list[int]:
    """0, and where documents end: half of the mean, one and a half of it, and again."""
    ends, long = [0], False
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + (3 * mean // 2 if long else max(1, mean // 2))))
        long = not long
    return ends


def amount(case: Timed, tensors: Tensors, backward: bool) -> float:
    """Operations of a pass; of decoding the bytes of keys and values."""
    if case.kind == "decode":
        return float(2 * tensors.k.numel() * tensors.k.element_size())
    heads = tensors.q.shape[-2 if case.kind == "varlen" else 1]
    batch = 1 if case.kind == "varlen" else tensors.q.shape[0]
    if case.kind in ("full", "fp8"):
        pairs = full_pairs(case.length, case.length)
    elif case.kind == "window":
        pairs = window_pairs(case.length, tensors.window)
    elif case.kind in ("document", "varlen"):
        pairs = causal_pairs(tensors.ends.diff().tolist())
    else:
        pairs = causal_pairs([case.length])
    count = backward_flops if backward else forward_flops
    return count(batch * pairs, heads, case.head_dim)


def visible(case: Timed, tensors: Tensors) -> Callable[[Any, Any], Any] | None:
    """Return which pairs attend, for integer tensors m and n that broadcast; None if all do."""
    if case.kind in ("full", "fp8", "decode"):
        return None
    if case.kind == "window":
        return lambda m, n: (n <= m) & (m - n < tensors.window)
    if case.kind in ("document", "varlen"):
        return lambda m, n: (n <= m) & (tensors.ids[m] == tensors.ids[n])
    return lambda m, n: n <= m


def ours(setting: Setting, case: Timed, tensors: Tensors) -> dict[str, Attend]:
    """Our ways of doing a case: ``ours``, and ``table`` where a BlockMask may serve better.

    ``pointers`` is the forward pass without tensor descriptors, for what these gain.
    """
    backend = setting.backend
    if case.kind == "varlen":
        ends = tensors.ends
        return {
            "ours": lambda q, k, v: tilewise.attention_varlen(
                q, k, v, ends, ends, mask=masks.causal(), backend=backend
            )
        }
    if case.kind == "fp8":
        q_scale, k_scale, v_scale = tensors.scales
        return {
            "ours": lambda q, k, v: tilewise.attention(
                q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, backend=backend
            )
        }
    score = scores.alibi(tensors.slopes) if case.kind == "alibi" else None
    mask: Any = None
    if case.kind in ("causal", "alibi"):
        mask = masks.causal()
    elif case.kind == "window":
        mask = masks.window(tensors.window - 1, 0)
    elif case.kind == "document":
        mask = masks.document(tensors.ids) & masks.causal()

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


def plain(case: Timed, tensors: Tensors, rows: Tensor | None = None) -> Attend:
    """Attention that writes its matrix, on every row or on those of ``rows`` (then q is cut too).

    q, k and v are [B, H, S, D] and may be of any floating dtype; ``rows`` are int64.
    """
    seen = visible(case, tensors)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        s = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
        m = (torch.arange(q.shape[2], device=q.device) if rows is None else rows)[:, None]
        n = torch.arange(k.shape[2], device=q.device)
        if case.kind == "alibi":
            s = s - tensors.slopes[:, None, None].to(s.dtype) * (m - n).abs()
        if seen is not None:
            s = s.masked_fill(~seen(m, n), -math.inf)
        return s.softmax(-1).to(v.dtype) @ v

    return attend


_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_PLAIN_MATRICES = 6  # of the size B Hq M N that plain attention and its gradients hold at once


def peers(setting: Setting, case: Timed, tensors: Tensors) -> dict[str, Attend]:
    """Return the others by name; FlexAttention, which compiles, is last."""
    found: dict[str, Attend] = {}
    if case.kind in ("full", "causal", "decode"):
        found |= {name: _sdpa(case, kind) for name, kind in _BACKENDS.items()}
    if case.kind == "varlen":
        found["flash"] = _torch_varlen(tensors, case)
    elif case.kind != "fp8":
        found["plain"] = _fitting(setting, case, tensors)
    if case.kind != "fp8":
        found[FLEX] = flex(setting, case, tensors)
    return found


def _sdpa(case: Timed, kind: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a backend declines: the error says so too
            return scaled_dot_product_attention(
                q, k, v, is_causal=case.kind == "causal", enable_gqa=q.shape[1] != k.shape[1]
            )

    return attend


def _torch_varlen(tensors: Tensors, case: Timed) -> Attend:
    longest = int(tensors.ends.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # New in torch, and said differently in each release.
        from torch.nn.attention.varlen import varlen_attn

        call: Any = varlen_attn
        given = (q, k, v, tensors.ends, tensors.ends, longest, longest)
        try:
            out: Tensor = call(*given, is_causal=True)
        except TypeError:
            out = call(*given, window_size=(-1, 0))
        return out

    return attend


def _fitting(setting: Setting, case: Timed, tensors: Tensors) -> Attend:
    """Plain attention, where its matrices fit."""
    matrix_bytes = tensors.q.shape[0] * tensors.q.shape[1] * tensors.q.shape[2] * case.length
    matrix_bytes *= tensors.q.element_size() * _PLAIN_MATRICES
    attend = plain(case, tensors)

    def checked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not setting.self_test and matrix_bytes > torch.cuda.mem_get_info()[1]:
            raise MemoryError(f"its matrices need {matrix_bytes / 1e9:.0f} GB")
        return attend(q, k, v)

    return checked


def flex(setting: Setting, case: Timed, tensors: Tensors) -> Attend:
    """FlexAttention with a block mask, compiled at its first call; as it is in the self-test."""
    made: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made.extend(_flex_parts(setting, case, tensors))
        function, block_mask, score = made
        if case.kind == "varlen":
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out: Tensor = function(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=grouped)
        return out[0].transpose(0, 1) if case.kind == "varlen" else out

    return attend


def _flex_parts(setting: Setting, case: Timed, tensors: Tensors) -> tuple[Any, Any, Any]:
    """Return the function, its block mask and its score."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen, block_mask, score = visible(case, tensors), None, None
    if seen is not None:
        shown = seen

        def mask_mod(b: Any, h: Any, m: Any, n: Any) -> Any:
            return shown(m, n)

        # One mask for all batch items and heads.
        block_mask = create_block_mask(
            mask_mod, None, None, case.length, case.length, device=str(setting.device)
        )
    if case.kind == "alibi":
        slopes = tensors.slopes

        def score_mod(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s - slopes[h] * (m - n)

        score = score_mod
    if setting.self_test:
        return flex_attention, block_mask, score
    torch.compiler.reset()  # it stops compiling after some variants
    # The gradients are asked for again and again from one graph.
    keep_buffers()
    return torch.compile(flex_attention, dynamic=False), block_mask, score
