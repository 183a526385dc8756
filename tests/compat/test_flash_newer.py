"""The calls of FlashAttention-3 and -4, against plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise
from tests import plain
from tests.compat.flash_reference import Flags, seen_of
from tests.contract import assert_exact
from tests.paged import in_pages
from tilewise.compat.flash_attn import cute, newer, version_3
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.variants.float8 import FLOAT8

THIRD: Any = version_3  # called with packed arguments
FOURTH: Any = cute
LENGTHS = ((7, 20), (9, 13), (0, 4), (5, 0))
USED_Q, USED_K = (5, 9, 0, 2), (11, 13, 4, 0)
FLAGS = [
    Flags(),
    Flags(causal=True),
    Flags(window_size=(6, 2), softcap=1.5),
    Flags(causal=True, window_size=(4, -1), softmax_scale=-0.3),
]


def drawn(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Packed q, k, v and qv, and the starts of their rows and keys."""
    generator = torch.Generator().manual_seed(5)
    rows, keys = (sum(each) for each in zip(*LENGTHS, strict=True))
    sizes = ((rows, 4, 16), (keys, 2, 16), (keys, 2, 24), (rows, 4, 24))
    tensors = [torch.randn(*size, generator=generator).to(dtype) for size in sizes]
    starts = [
        torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in zip(*LENGTHS, strict=True)
    ]
    return tensors, starts


def reference(
    tensors: list[Tensor],
    flags: Flags,
    used: tuple[tuple[int, ...], tuple[int, ...]],
    chunk: int = 0,
    sink: Tensor | None = None,
    lists: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Out [Tq, Hq, Dv] and lse [Hq, Tq], in the dtype of the tensors; rows unused see no key.

    ``lists`` [Tq, K] are of the keys that rows read.
    """
    q, k, v, *qv = tensors
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full(q.shape[:2][::-1], -torch.inf)
    lse = lse if sink is None else torch.logaddexp(lse, sink[:, None])
    first, first_key = 0, 0
    for (rows, keys), m, n in zip(LENGTHS, *used, strict=True):
        here, there = slice(first, first + m), slice(first_key, first_key + n)
        part, its_keys = q[here], k[there]
        if qv:
            part = torch.cat([part, qv[0][here]], -1)
            its_keys = torch.cat([its_keys, v[there]], -1)
        seen = seen_of(m, n, flags)
        if chunk:
            at = torch.arange(m)[:, None] + n - m
            seen &= torch.arange(n)[None] // chunk == at // chunk
        if lists is not None:
            seen &= (lists[here, :, None] == torch.arange(n)).any(1)

        def score(s: Tensor, *_: Tensor) -> Tensor:
            return flags.softcap * torch.tanh(s / flags.softcap) if flags.softcap else s

        if m and n:
            found = plain.attend(
                *(each.transpose(0, 1)[None] for each in (part, its_keys, v[there])),
                scale=flags.softmax_scale,
                score=score,
                mask=lambda *_, seen=seen: seen,
                sinks=sink,
            )
            out[here], lse[:, here] = found.out[0].transpose(0, 1), found.lse[0]
        first, first_key = first + rows, first_key + keys
    return out, lse


def checked(
    call: Callable[..., tuple[Tensor, Tensor]],
    tensors: list[Tensor],
    compare: Callable[[list[Tensor]], tuple[Tensor, Tensor]],
) -> None:
    """Output, lse and gradients by the 2x rule."""
    results = []
    for which, dtype in ((call, None), (lambda *x: compare(list(x)), None), (call, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
        out, lse = (which if dtype is None else lambda *x: compare(list(x)))(*leaves)
        grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape)
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
        results.append([out.detach(), lse.detach(), *grads])
    names = ("out", "lse", "dq", "dk", "dv", "dqv or dsink", "dsink")
    for name, *three in zip(names, *results, strict=False):
        assert_exact(three[0], three[1], three[2], name)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("part", ["all", "used"])
def test_the_third_version(flags: Flags, chunk: int, part: str) -> None:
    """Packed sequences of different lengths, qv, chunks, and rows that are not used."""
    tensors, starts = drawn()
    rows, keys = zip(*LENGTHS, strict=True)
    used = (USED_Q, USED_K) if part == "used" else (rows, keys)
    asked = [torch.tensor(each) if part == "used" else None for each in used]

    def call(q: Tensor, k: Tensor, v: Tensor, *qv: Tensor) -> Any:
        return THIRD.flash_attn_varlen_func(
            q,
            k,
            v,
            *starts,
            9,
            20,
            *asked,
            softmax_scale=flags.softmax_scale,
            causal=flags.causal,
            qv=qv[0] if qv else None,
            window_size=flags.window_size,
            attention_chunk=chunk,
            softcap=flags.softcap,
            return_attn_probs=True,
        )

    for count in (3, 4):
        checked(call, tensors[:count], lambda x: reference(x, flags, used, chunk))


def listed(count: int = 9) -> Tensor:
    """Keys of each row, some of them past its sequence's end or below 0; one row has none."""
    generator = torch.Generator().manual_seed(6)
    rows = [torch.rand(n, 24, generator=generator).argsort(1)[:, :count] - 2 for n, _ in LENGTHS]
    lists = torch.cat(rows).to(torch.int32)
    lists[3] = -1
    lists[4, :3] = torch.tensor([2**31 - 1, -(2**31), 19])
    return lists


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("part", ["all", "used"])
@pytest.mark.parametrize("qv", [False, True])
@pytest.mark.parametrize("lists", [None, listed()], ids=["every key", "lists"])
def test_the_fourth_version(flags: Flags, part: str, qv: bool, lists: Tensor | None) -> None:
    """With a sink, which has a gradient, and with qv, beside which the lse has the heads last."""
    tensors, starts = drawn()
    rows, keys = zip(*LENGTHS, strict=True)
    used = (USED_Q, USED_K) if part == "used" else (rows, keys)
    asked = [torch.tensor(each) if part == "used" else None for each in used]
    window = tuple(None if each < 0 else each for each in flags.window_size)
    sink = torch.linspace(-1, 2, 4)
    given: dict[str, Any] = {}
    if lists is not None:
        given = {"gather_kv_indices": lists, "gather_bwd_recompute_p": qv}
        given["gather_bwd_token_chunk"] = np.int64(4)

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        *own, sink = rest
        out, lse = FOURTH.flash_attn_varlen_func(
            q,
            k,
            v,
            own[0] if own else None,
            *starts,
            seqused_q=asked[0],
            seqused_k=asked[1],
            softmax_scale=flags.softmax_scale,
            causal=flags.causal,
            window_size=window,
            learnable_sink=sink,
            softcap=flags.softcap,
            return_lse=True,
            **given,
        )
        return out, lse.T if own else lse

    leaves = [*tensors[: 3 + qv], sink]
    checked(call, leaves, lambda x: reference(x[:-1], flags, used, sink=x[-1], lists=lists))


# ---- lists of keys


def test_lists_of_keys_of_one_length() -> None:
    """Dense calls, int64 lists and pages are packed calls of the same sequences."""
    (q, k, v, qv), _ = drawn()
    q, k, v, qv = (
        q[:14].unflatten(0, (2, 7)),
        *(x[:28] for x in (k, v)),
        qv[:14].unflatten(0, (2, 7)),
    )
    lists = listed()[:14]
    starts = torch.tensor([0, 7, 14]), torch.tensor([0, 14, 28])
    packed = [x.flatten(0, 1) for x in (q, qv)]
    out, lse = FOURTH.flash_attn_varlen_func(
        packed[0], k, v, packed[1], *starts, gather_kv_indices=lists, causal=True, return_lse=True
    )
    expected = out.unflatten(0, (2, 7)), lse.unflatten(0, (2, 7))
    k, v = (x.unflatten(0, (2, 14)) for x in (k, v))
    lists = lists.long().unflatten(0, (2, 7))
    found = FOURTH.flash_attn_func(q, k, v, qv, lists, causal=True, return_lse=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    own_keys, own_values = ([x.transpose(0, 1) for x in each] for each in (k, v))
    paged = in_pages(own_keys, own_values, 4)
    pages = [x.transpose(1, 2) for x in paged[:2]]
    words = {"seqused_k": paged.key_lengths, "page_table": paged.block_table, "causal": True}
    found = FOURTH.flash_attn_varlen_func(
        q, *pages, qv, gather_kv_indices=lists, return_lse=True, **words
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    found = FOURTH.flash_attn_varlen_func(
        packed[0],
        *pages,
        packed[1],
        starts[0],
        gather_kv_indices=lists.flatten(0, 1),
        return_lse=True,
        **words,
    )
    torch.testing.assert_close(found[0], expected[0].flatten(0, 1))
    torch.testing.assert_close(found[1], expected[1].flatten(0, 1))


def test_dense_calls_are_those_of_one_sequence_each() -> None:
    (q, k, v, qv), _ = drawn()
    q, k, v, qv = (x[None, :7] for x in (q, k, v, qv))
    third = THIRD.flash_attn_func(q, k, v, causal=True, qv=qv, return_attn_probs=True)
    starts = torch.tensor([0, 7])
    packed = THIRD.flash_attn_varlen_func(
        q[0], k[0], v[0], starts, starts, 7, 7, causal=True, qv=qv[0], return_attn_probs=True
    )
    for one, other in zip(third, packed, strict=True):
        torch.testing.assert_close(one[0], other)
    out, none = FOURTH.flash_attn_func(q, k, v, causal=True)
    assert none is None
    torch.testing.assert_close(out, THIRD.flash_attn_func(q, k, v, causal=True))
    out, lse = FOURTH.flash_attn_func(q, k, v, qv, causal=True, return_lse=True)
    torch.testing.assert_close(out, third[0])
    torch.testing.assert_close(lse, third[1].transpose(1, 2))
    heads = torch.cat([q, k, k], 2)
    found = THIRD.flash_attn_qkvpacked_func(heads, causal=True, num_heads_q=4)
    torch.testing.assert_close(found, THIRD.flash_attn_func(q, k, k, causal=True))
    stacked = torch.stack([q, q, q], 2)
    found = THIRD.flash_attn_qkvpacked_func(stacked)
    torch.testing.assert_close(found, THIRD.flash_attn_func(q, q, q))


def test_descales_are_of_the_heads_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float8, which a CPU computes by the reference alone."""
    monkeypatch.setattr(newer, "attention", partial(tilewise.attention, backend="tiled"))
    generator = torch.Generator().manual_seed(1)
    narrow = [torch.randn(2, 9, h, 16, generator=generator).to(FLOAT8) for h in (4, 2, 2)]
    descales = [torch.rand(2, 2, generator=generator) + 0.5 for _ in narrow]
    names = ("q_descale", "k_descale", "v_descale")
    found = THIRD.flash_attn_func(*narrow, causal=True, **dict(zip(names, descales, strict=True)))
    wide = [
        x.float() * scale[:, None].repeat_interleave(x.shape[2] // 2, 2)[..., None]
        for x, scale in zip(narrow, descales, strict=True)
    ]
    expected = THIRD.flash_attn_func(*wide, causal=True)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("lists", [None, listed()], ids=["all keys", "lists"])
def test_keys_that_are_not_used_may_hold_anything(lists: Tensor | None) -> None:
    (q, k, v, _), starts = drawn()
    words = {"seqused_k": torch.tensor(USED_K), "causal": True, "gather_kv_indices": lists}
    expected = FOURTH.flash_attn_varlen_func(q, k, v, None, *starts, **words)[0]
    k, v = k.clone(), v.clone()
    k[11:20], v[11:20] = torch.nan, torch.nan
    found = FOURTH.flash_attn_varlen_func(q, k, v, None, *starts, **words)[0]
    torch.testing.assert_close(found, expected)


def test_descales_over_pages() -> None:
    """Of the shared call: no signature has both beside a page_table and nothing cached."""
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(2, 3, 4, 16, generator=generator).to(FLOAT8)
    k, v = (torch.randn(2, 11, 2, 16, generator=generator).to(FLOAT8) for _ in "kv")
    one, two, three = (torch.rand(2, 2, generator=generator) + 0.5 for _ in "qkv")
    descales = (one, two, three)
    table = torch.tensor([[1], [0]])
    flags = newer.Flags(None, True, (-1, -1), 0.0)
    where = newer.Sequences(used_k=torch.tensor([11, 4]), pages=table)
    found = newer.computed(q, k, v, flags, where, None, descales)
    cached = THIRD.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=torch.tensor([11, 4]),
        page_table=table,
        causal=True,
        q_descale=descales[0],
        k_descale=descales[1],
        v_descale=descales[2],
        return_softmax_lse=True,
    )
    torch.testing.assert_close(tuple(found), cached, rtol=0, atol=0)
    unscaled = newer.computed(q, k, v, flags, where)
    assert not torch.equal(found.lse, unscaled.lse)


def test_pages_and_caches() -> None:
    generator = torch.Generator().manual_seed(2)
    keys, values = (
        [torch.randn(2, n, 16, generator=generator) for n in (20, 0, 33)] for _ in range(2)
    )
    paged = in_pages(keys, values, 8)
    pages = [x.transpose(1, 2) for x in paged[:2]]
    q = torch.randn(3, 1, 4, 16, generator=generator)
    sink = torch.randn(4)
    found, lse = FOURTH.flash_attn_varlen_func(
        q,
        *pages,
        seqused_k=paged.key_lengths,
        page_table=paged.block_table,
        causal=True,
        learnable_sink=sink,
        return_lse=True,
    )
    assert lse is not None
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        one, own = FOURTH.flash_attn_func(
            q[b : b + 1],
            *(x[None].transpose(1, 2) for x in (k, v)),
            causal=True,
            learnable_sink=sink,
            return_lse=True,
        )
        torch.testing.assert_close(found[b : b + 1], one)
        torch.testing.assert_close(lse[b : b + 1], own)
    cached = THIRD.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=paged.key_lengths, page_table=paged.block_table, causal=True
    )
    alone = FOURTH.flash_attn_varlen_func(
        q, *pages, seqused_k=paged.key_lengths, page_table=paged.block_table, causal=True
    )[0]
    torch.testing.assert_close(cached, alone)


Q = torch.zeros(1, 3, 2, 8)
ROWS = torch.zeros(3, 2, 8)
LISTS = torch.zeros(1, 3, 2, dtype=torch.int32)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rank": (lambda: THIRD.flash_attn_func(ROWS, Q, Q), InvalidArgument, "^q: "),
    "qv": (
        lambda: THIRD.flash_attn_func(Q, Q, Q, qv=Q[..., :4]),
        InvalidArgument,
        r"^qv: .*\[1, 3, 2, 8\]",
    ),
    "chunk": (
        lambda: THIRD.flash_attn_func(Q, Q, Q, attention_chunk=-1),
        InvalidArgument,
        "^attention_chunk: ",
    ),
    "descale": (
        lambda: THIRD.flash_attn_func(Q, Q, Q, q_descale=torch.ones(3)),
        InvalidArgument,
        r"^q_descale: .*\[1, 2\]",
    ),
    "heads": (
        lambda: THIRD.flash_attn_qkvpacked_func(Q, num_heads_q=2),
        InvalidArgument,
        "^num_heads_q: ",
    ),
    "one start": (
        lambda: FOURTH.flash_attn_varlen_func(ROWS, ROWS, ROWS, cu_seqlens_q=torch.tensor([0, 3])),
        InvalidArgument,
        "^cu_seqlens_k: got None; required: both of",
    ),
    "used": (
        lambda: FOURTH.flash_attn_varlen_func(Q, Q, Q, seqused_k=torch.tensor([1, 2])),
        InvalidArgument,
        r"^seqused_k: .*\[1\]",
    ),
    "more than there are": (
        lambda: FOURTH.flash_attn_varlen_func(Q, Q, Q, seqused_q=torch.tensor([4])),
        InvalidArgument,
        r"^seqused_q: got \[4\]; required: from 0 to the sequences' lengths, \[3\]",
    ),
    "no tensor": (lambda: FOURTH.flash_attn_func(Q, Q, 3), InvalidType, "^v: "),
    "mask_mod": (
        lambda: FOURTH.flash_attn_func(Q, Q, Q, mask_mod=lambda *_: True),
        Unsupported,
        "mask_mod of FlashAttention-4.*\n.*tilewise.attention",
    ),
    "lists of all heads": (
        lambda: FOURTH.flash_attn_func(Q, Q, Q, Q, LISTS[:, None]),
        InvalidArgument,
        r"^gather_kv_indices: got shape \(1, 1, 3, 2\); required: .*\[1, 3, any\]",
    ),
    "floating lists": (
        lambda: FOURTH.flash_attn_func(Q, Q, Q, Q, LISTS.float()),
        InvalidArgument,
        "^gather_kv_indices: got a tensor of torch.float32",
    ),
    "starts of lists": (
        lambda: FOURTH.flash_attn_varlen_func(
            ROWS,
            ROWS,
            ROWS,
            cu_seqlens_q=torch.tensor([0, 3]),
            cu_seqlens_k=torch.tensor([0, 1, 3]),
            gather_kv_indices=LISTS[0],
        ),
        InvalidArgument,
        r"^cu_seqlens_k: .*\[2\]",
    ),
    "backward without lists": (
        lambda: FOURTH.flash_attn_varlen_func(Q, Q, Q, gather_bwd_recompute_p=True),
        InvalidArgument,
        "^gather_bwd_recompute_p: got True; required: a call with gather_kv_indices",
    ),
    "chunk without lists": (
        lambda: FOURTH.flash_attn_func(Q, Q, Q, gather_bwd_token_chunk=4),
        InvalidArgument,
        "^gather_bwd_token_chunk: got 4; required: a call with gather_kv_indices",
    ),
    "recompute": (
        lambda: FOURTH.flash_attn_func(Q, Q, Q, Q, LISTS, gather_bwd_recompute_p=1),
        InvalidType,
        "^gather_bwd_recompute_p: got a int",
    ),
    "no chunk of tokens": (
        lambda: FOURTH.flash_attn_func(Q, Q, Q, Q, LISTS, gather_bwd_token_chunk=0),
        InvalidArgument,
        "^gather_bwd_token_chunk: got 0; required: an integer, 1 or more",
    ),
    "true as a chunk of tokens": (
        lambda: FOURTH.flash_attn_func(Q, Q, Q, Q, LISTS, gather_bwd_token_chunk=True),
        InvalidType,
        "^gather_bwd_token_chunk: got a bool",
    ),
    "descale of 32 bits": (
        lambda: THIRD.flash_attn_func(Q, Q, Q, v_descale=torch.ones(1, 2)),
        InvalidArgument,
        "^v_descale: got one for v of torch.float32; required: torch.float8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call()


# ---- splits joined


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_are_joined(dtype: torch.dtype) -> None:
    """Keys in three sets, one of which no row sees: what all of them together give."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator) for n, h in ((5, 4), (30, 2), (30, 2)))
    due, due_lse = version_3.flash_attn_func(q, k, v, return_attn_probs=True)
    outs, lses = [torch.full_like(due, torch.nan)], [torch.full((2, 4, 5), -torch.inf)]
    for part in (slice(0, 11), slice(11, 30)):
        out, lse = version_3.flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True)
        outs.append(out)
        lses.append(lse)
    partial_lse = torch.stack(lses).transpose(2, 3)  # by rows, not contiguous
    found, found_lse = version_3.flash_attn_combine(torch.stack(outs), partial_lse, None, dtype)
    assert found.dtype == dtype
    assert found_lse.dtype == torch.float32
    torch.testing.assert_close(found_lse, due_lse.transpose(1, 2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found, due.to(dtype), rtol=1e-5, atol=2e-6 if dtype == torch.float32 else 2e-2
    )
    room = torch.empty_like(due)
    given, _ = version_3.flash_attn_combine(torch.stack(outs), partial_lse, room)
    assert given is room
    assert torch.equal(given.to(dtype), found)


def test_splits_that_do_not_fit_are_refused() -> None:
    outs, lses = torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4)
    nothing, lse = version_3.flash_attn_combine(outs, torch.full_like(lses, -torch.inf))
    assert torch.equal(nothing, torch.zeros(1, 3, 4, 8))
    assert bool((lse == -torch.inf).all())
    for wrong, name in (
        ((outs[:0], lses[:0]), "out_partial"),
        ((outs[0], lses), "out_partial"),
        ((outs, lses.transpose(2, 3)), "lse_partial"),
        ((outs, lses, torch.zeros(1, 4, 3, 8)), "out"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            version_3.flash_attn_combine(*wrong)
    with pytest.raises(InvalidType, match="out_partial"):
        THIRD.flash_attn_combine([outs[0]], lses)


def test_what_would_be_planned_is_nothing() -> None:
    """The tensor goes where a call takes it, and changes no bit."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, n, 2, 16, generator=generator) for n in (1, 20, 20))
    used = torch.tensor([20, 7], dtype=torch.int32)
    planned = version_3.get_scheduler_metadata(2, 1, 20, 2, 2, 16, used, causal=True)
    assert planned.dtype == torch.int32
    assert planned.numel() == 0
    call = partial(version_3.flash_attn_with_kvcache, q, k, v, cache_seqlens=used, causal=True)
    assert torch.equal(call(scheduler_metadata=planned), call())
    with pytest.raises(InvalidArgument, match="cache_seqlens"):
        version_3.get_scheduler_metadata(2, 1, 20, 2, 2, 16, used.float())
