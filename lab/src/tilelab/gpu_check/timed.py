"""The timed cases: rows of the table at widths and lengths, and the ways to do them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilelab.cases.case import Case, Pass
from tilelab.cases.table import rows
from tilelab.cases.variants import uneven
from tilelab.gpu_check.outcomes import quantised
from tilelab.gpu_check.record import FLEX
from tilelab.gpu_check.setting import Setting, Sizes
from tilelab.peers import methods
from tilelab.peers.methods import Method
from tilelab.peers.work import Attend, Given, Work, flops
from tilewise import BlockMask, masks

_CAUSAL = ("causal",)
_PACKED, _DECODED, _EIGHT_BITS = "varlen", "decode", "fp8"


def sized(sizes: Sizes, row: Case, width: int, length: int) -> Case:
    """Return a row at a width and a length; its kind in records is the row's name."""
    few = row.queries == 1
    keys = sizes.decode_keys if few else length
    heads = row.heads if few else sizes.hidden // width
    return replace(
        row,
        name=f"D{width} {row.name} {keys}",
        kind=row.name,
        batch=sizes.decode_batch if few else sizes.tokens // length,
        heads=heads,
        kv_heads=row.kv_heads if few else heads,
        queries=1 if few else length,
        keys=keys,
        head_dim=width,
        value_dim=width,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Return every case, those with a goal first."""
    return [*with_goals(sizes), *other_lengths(sizes)]


def with_goals(sizes: Sizes) -> list[Case]:
    """Return the two greatest lengths, the variants, and what is no square problem.

    One of each kind comes first: time that runs out costs a second width or length.
    """
    longest, second = sizes.lengths[:2]
    first, others = sizes.widths[0], sizes.widths[1:2]
    variants = rows("widths")
    once = [*variants, *rows("one width")]
    return [
        *(sized(sizes, row, width, longest) for width in sizes.widths for row in rows("lengths")),
        *(sized(sizes, row, first, longest) for row in once),
        *(sized(sizes, row, width, longest) for width in others for row in variants),
        *(sized(sizes, row, width, second) for width in sizes.widths for row in rows("lengths")),
    ]


def other_lengths(sizes: Sizes) -> list[Case]:
    """Shorter lengths, at the same number of tokens."""
    lengths, widths = sizes.lengths[2:], sizes.widths
    return [sized(sizes, row, d, n) for n in lengths for d in widths for row in rows("lengths")]


def names(chosen: Callable[[Sizes], list[Case]]) -> Callable[[Setting], list[str]]:
    """Return what names some cases in a setting."""
    return lambda setting: [case.name for case in chosen(setting.sizes)]


def find(sizes: Sizes, name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in cases(sizes) if case.name == name)


def directions(case: Case) -> tuple[Pass, ...]:
    """Return the passes of a case that are timed."""
    return ("forward", "backward") if case.passes == "both" else ("forward",)


def amount(work: Work) -> float:
    """Operations of the passes of a work; of decoding the bytes of keys and values."""
    if work.kind == _DECODED:
        return 2.0 * work.batch * work.kv_heads * work.keys * work.head_dim * work.dtype.itemsize
    return flops(work)


def ours(case: Case) -> dict[str, Method]:
    """Our ways of doing a case: ``ours``, and ``table`` where a BlockMask may serve better."""
    if case.kind == _PACKED:
        return {"ours": Method("ours", _packed)}
    if case.kind == _EIGHT_BITS:
        return {"ours": Method("ours", _in_float8)}
    found = {"ours": methods.ours()}
    if case.kind == "document":
        found["table"] = Method("table", _by_table)
    return found


def _ends(work: Work) -> Tensor:
    """Where the documents of a packed case begin and end, int32 [documents + 1]."""
    return torch.tensor(uneven(work.keys), dtype=torch.int32, device=work.device)


def _packed(work: Work, given: Given) -> Attend:
    """Attention over packed documents, of one sequence [1, H, T, D] that holds them all."""
    ends = _ends(work)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = tilewise.attention_varlen(
            q, k, v, ends, ends, mask=masks.causal(), backend=work.backend
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


def _by_table(work: Work, given: Given) -> Attend:
    mask = BlockMask.of(work.drawn_mask, work.keys, dtype=given.q.dtype)
    return lambda q, k, v: tilewise.attention(q, k, v, mask=mask, backend=work.backend)


def peers(setting: Setting, case: Case) -> dict[str, Method]:
    """Return the others by name; FlexAttention, which compiles, is last."""
    found: dict[str, Method] = {}
    if case.mask in ((), _CAUSAL) and not case.score and case.kind != _EIGHT_BITS:
        found |= {name: methods.sdpa(name) for name in ("cudnn", "flash", "efficient")}
    if case.kind == _PACKED:
        found["flash"] = Method("flash", _torch_varlen)
    elif case.kind != _EIGHT_BITS:
        found["plain"] = methods.written_out()
    return found | flex(setting, case)


def flex(setting: Setting, case: Case) -> dict[str, Method]:
    """FlexAttention where it can do a case; in the self-test it is not compiled."""
    if case.kind == _EIGHT_BITS:
        return {}
    return {FLEX: methods.flex(compiled=not setting.self_test)}


def _torch_varlen(work: Work, given: Given) -> Attend:
    ends = _ends(work)
    longest = int(ends.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # New in torch, and said differently in each release.
        from torch.nn.attention.varlen import varlen_attn

        call: Any = varlen_attn
        packed = (*(x[0].transpose(0, 1) for x in (q, k, v)), ends, ends, longest, longest)
        try:
            out: Tensor = call(*packed, is_causal=True)
        except TypeError:
            out = call(*packed, window_size=(-1, 0))
        return out.transpose(0, 1)[None]

    return attend
