"""The timed cases, each as a work of ``tilelab.peers``, and the ways to do them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilelab.gpu_check.outcomes import quantised
from tilelab.gpu_check.record import FLEX
from tilelab.gpu_check.setting import Setting, Sizes
from tilelab.peers import methods
from tilelab.peers.methods import Method
from tilelab.peers.work import Attend, Given, Pass, Work, causal_pairs, flops, window_pairs
from tilewise import BlockMask, masks, scores
from tilewise.inspect.gpu import by_pointers

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


def names(chosen: Callable[[Sizes], list[Timed]]) -> Callable[[Setting], list[str]]:
    """Return what names some cases in a setting."""
    return lambda setting: [case.name for case in chosen(setting.sizes)]


def find(sizes: Sizes, name: str) -> Timed:
    """Return the case of that name."""
    return next(case for case in cases(sizes) if case.name == name)


def work_of(setting: Setting, case: Timed, passes: Pass = "forward") -> Work:
    """Return a case as what every method is given; documents of uneven lengths, always the same.

    A varlen case is one sequence of documents to the methods that know no packed ones.
    """
    sizes, few = setting.sizes, case.kind == "decode"
    heads = _DECODE_HEADS if few else sizes.hidden // case.head_dim
    return setting.work(
        "speed",
        case.name,
        case.length,
        heads,
        case.head_dim,
        kv_heads=_DECODE_KV_HEADS if few else heads,
        batch=sizes.decode_batch if few else sizes.tokens // case.length,
        passes=passes,
        queries=1 if few else 0,
        packed=case.kind == "varlen",
        **_variant(setting, case, heads),
    )


def _variant(setting: Setting, case: Timed, heads: int) -> dict[str, Any]:
    """Return the mask and the score of a case as fields of a Work."""
    if case.kind in ("full", "fp8", "decode"):
        return {}
    if case.kind == "window":
        width = setting.sizes.window
        return {
            "mask": masks.window(width - 1, 0),
            "flex_mask": lambda b, h, m, n: (n <= m) & (m - n < width),
        }
    if case.kind in ("document", "varlen"):
        ends = ends_of(setting, case)
        ids = torch.repeat_interleave(
            torch.arange(len(ends) - 1, device=setting.device), ends.diff()
        )
        return {
            "mask": masks.document(ids) & masks.causal(),
            "flex_mask": lambda b, h, m, n: (n <= m) & (ids[m] == ids[n]),
        }
    found: dict[str, Any] = {
        "mask": masks.causal(),
        "flex_mask": lambda b, h, m, n: n <= m,
    }
    if case.kind == "alibi":
        steps = [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]
        slopes = torch.tensor(steps, device=setting.device)
        found["score"] = scores.alibi(slopes)
        found["flex_score"] = lambda s, b, h, m, n: s - slopes[h] * (m - n)
    return found


def ends_of(setting: Setting, case: Timed) -> Tensor:
    """Where the documents of a case begin and end, int32 [documents + 1]."""
    ends = _ends(case.length, setting.sizes.documents)
    return torch.tensor(ends, dtype=torch.int32, device=setting.device)


def _ends(length: int, mean: int) -> list[int]:
    """0, and where documents end: half of the mean, one and a half of it, and again."""
    ends, long = [0], False
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + (3 * mean // 2 if long else max(1, mean // 2))))
        long = not long
    return ends


def amount(setting: Setting, case: Timed, work: Work) -> float:
    """Operations of the passes of a work; of decoding the bytes of keys and values."""
    if case.kind == "decode":
        itemsize = setting.dtype.itemsize
        return float(2 * work.batch * work.kv_heads * work.length * work.head_dim * itemsize)
    if case.kind in ("full", "fp8"):
        pairs = float(case.length**2)
    elif case.kind == "window":
        pairs = window_pairs(case.length, setting.sizes.window)
    elif case.kind in ("document", "varlen"):
        pairs = causal_pairs(ends_of(setting, case).diff().tolist())
    else:
        pairs = causal_pairs([case.length])
    backward = work.passes == "backward"
    return flops(work.batch * pairs, work.heads, work.head_dim, backward=backward)


def ours(setting: Setting, case: Timed) -> dict[str, Method]:
    """Our ways of doing a case: ``ours``, and ``table`` where a BlockMask may serve better.

    ``pointers`` is the forward pass without tensor descriptors, for what these gain.
    """
    if case.kind == "varlen":
        return {"ours": Method("ours", lambda work, given: _packed(setting, case))}
    if case.kind == "fp8":
        return {"ours": Method("ours", _in_float8)}
    found = {"ours": methods.ours()}
    if case.kind in (*PLAIN_KINDS, "alibi"):
        found[POINTERS] = Method(POINTERS, _by_pointers)
    if case.kind == "document":
        found["table"] = Method("table", _by_table)
    return found


def _packed(setting: Setting, case: Timed) -> Attend:
    """Attention over packed documents, of one sequence [1, H, T, D] that holds them all."""
    ends = ends_of(setting, case)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = tilewise.attention_varlen(
            q, k, v, ends, ends, mask=masks.causal(), backend=setting.backend
        )
        return out.transpose(0, 1)[None]

    return attend


def _in_float8(work: Work, given: Given) -> Attend:
    """Attention of the tensors in float8 e4m3, whatever it is called with."""
    pairs = [quantised(x) for x in (given.q, given.k, given.v)]
    (q, k, v), scales = (x for x, _ in pairs), [scale for _, scale in pairs]
    names = ("q_scale", "k_scale", "v_scale")
    keywords: dict[str, Any] = dict(zip(names, scales, strict=True))
    return lambda *_: tilewise.attention(q, k, v, **keywords, backend=work.backend)


def _by_pointers(work: Work, given: Given) -> Attend:
    attend = methods.ours().make(work, given)

    def without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with by_pointers():
            return attend(q, k, v)

    return without


def _by_table(work: Work, given: Given) -> Attend:
    mask = BlockMask.of(work.mask, work.length, dtype=given.q.dtype)
    return lambda q, k, v: tilewise.attention(q, k, v, mask=mask, backend=work.backend)


def peers(setting: Setting, case: Timed) -> dict[str, Method]:
    """Return the others by name; FlexAttention, which compiles, is last."""
    found: dict[str, Method] = {}
    if case.kind in (*PLAIN_KINDS, "decode"):
        found |= {name: methods.sdpa(name) for name in ("cudnn", "flash", "efficient")}
    if case.kind == "varlen":
        found["flash"] = Method("flash", lambda work, given: _torch_varlen(setting, case))
    elif case.kind != "fp8":
        found["plain"] = methods.written_out()
    return found | flex(setting, case)


def flex(setting: Setting, case: Timed) -> dict[str, Method]:
    """FlexAttention where it can do a case; in the self-test it is not compiled."""
    return {} if case.kind == "fp8" else {FLEX: methods.flex(compiled=not setting.self_test)}


def _torch_varlen(setting: Setting, case: Timed) -> Attend:
    ends = ends_of(setting, case)
    longest = int(ends.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # New in torch, and said differently in each release.
        from torch.nn.attention.varlen import varlen_attn

        call: Any = varlen_attn
        given = (*(x[0].transpose(0, 1) for x in (q, k, v)), ends, ends, longest, longest)
        try:
            out: Tensor = call(*given, is_causal=True)
        except TypeError:
            out = call(*given, window_size=(-1, 0))
        return out.transpose(0, 1)[None]

    return attend
