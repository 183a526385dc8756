"""flash_attn_func and its varlen and packed forms against the documentation in plain torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise
from tests.compat.flash_reference import Flags, attend, attend_packed, slopes_of
from tests.contract import assert_all_exact, assert_exact, assert_same_bits
from tilewise.compat import flash_attn as module
from tilewise.errors import InvalidArgument, InvalidType, TilewiseError, Unsupported

flash_attn: Any = module  # calls here are made of tuples and dicts, and some are wrong
FLAGS = (
    Flags(),
    Flags(causal=True),
    Flags(window_size=(3, 2)),
    Flags(window_size=(4, -1)),
    Flags(window_size=(-1, 5)),
    Flags(causal=True, window_size=(6, 9)),
    Flags(softcap=1.5),
    Flags(alibi="1-D"),
    Flags(causal=True, alibi="2-D", softcap=2.0, window_size=(11, -1), softmax_scale=0.31),
)
HALVES = (torch.bfloat16, torch.float16)


def draw(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, as a leaf."""
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(sizes, generator=generator).to(dtype).requires_grad_()


def words(flags: Flags, slopes: Tensor | None) -> dict[str, Any]:
    """The flags as keywords of the call."""
    said = flags._asdict()
    del said["alibi"]
    return {**said, "alibi_slopes": slopes}


def check(
    got: tuple[Tensor, Tensor],
    leaves: dict[str, Tensor],
    reference: Any,
    dtype: torch.dtype,
) -> None:
    """Out, lse and the gradients of the leaves by the contract; ``reference(dtype)`` is plain."""
    plain, oracle = reference(dtype)[:2], reference(torch.float64)[:2]
    assert got[0].dtype == dtype
    assert got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, one, two, three in zip(("out", "lse"), got, plain, oracle, strict=True):
        assert_exact(one, two.to(one.dtype), three, name)
    weights = draw(*got[0].shape, seed=9).detach()
    grads = [
        torch.autograd.grad((out * weights.to(out.dtype)).sum(), tuple(leaves.values()))
        for out in (got[0], plain[0], oracle[0])
    ]
    assert_all_exact(grads[0], grads[1], grads[2], leaves, "gradient of ")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_documented_attention(flags: Flags, dtype: torch.dtype) -> None:
    q, k, v = (draw(2, *sizes, 24, dtype=dtype) for sizes in ((13, 6), (19, 2), (19, 2)))
    slopes = slopes_of(flags, 2, 6)
    out, lse, signed = flash_attn.flash_attn_func(
        q, k, v, **words(flags, slopes), return_attn_probs=True
    )
    assert signed.numel() == 0
    assert signed.dtype == dtype
    check(
        (out, lse),
        {"q": q, "k": k, "v": v},
        lambda kind: attend(q, k, v, flags, slopes, kind),
        dtype,
    )


def test_float64_is_taken() -> None:
    q, k, v = (draw(2, rows, 2, 8, dtype=torch.float64) for rows in (5, 7, 7))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = tilewise.attention(*heads_first, mask=tilewise.masks.causal(), return_lse=True)
    assert_same_bits(out, expected.out.transpose(1, 2), "out")
    assert_same_bits(lse, expected.lse, "lse")


@pytest.mark.parametrize("rows", [1, 7, 30])
@pytest.mark.parametrize(
    "flags", [Flags(causal=True), Flags(window_size=(2, 0)), Flags(window_size=(0, 1))], ids=str
)
def test_rows_without_keys_give_0_and_lse_inf(flags: Flags, rows: int) -> None:
    q, k, v = (draw(1, n, 2, 8) for n in (rows, 7, 7))
    got = flash_attn.flash_attn_func(q, k, v, **words(flags, None), return_attn_probs=True)
    leaves = {"q": q, "k": k, "v": v}
    check(got[:2], leaves, lambda kind: attend(q, k, v, flags, None, kind), torch.float32)
    if rows == 30:
        assert bool((got[0][:, :20] == 0).all())
        assert bool((got[1][..., :20] == math.inf).all())


def test_a_call_without_keys_gives_0() -> None:
    q, k = draw(1, 3, 2, 8).detach(), draw(1, 0, 2, 8).detach()
    out, lse, _ = flash_attn.flash_attn_func(q, k, k, return_attn_probs=True)
    assert_same_bits(out, torch.zeros_like(q), "out")
    assert bool((lse == math.inf).all())


def test_strides_do_not_matter() -> None:
    wide = draw(2, 21, 4, 24)
    with torch.no_grad():
        q, k, v = wide[:, ::2, :, 1::3], wide[:, 3:, :2, 4:12], wide[:, 3:, 2:, 16:]
        assert not q.is_contiguous()
        packed = [x.contiguous() for x in (q, k, v)]
        assert_same_bits(
            flash_attn.flash_attn_func(q, k, v, causal=True),
            flash_attn.flash_attn_func(*packed, causal=True),
            "out",
        )
        assert flash_attn.flash_attn_func(*packed).is_contiguous()


def test_packed_forms_are_the_plain_call() -> None:
    qkv = draw(2, 11, 3, 4, 16)
    flags = {"causal": True, "softcap": 2.0, "window_size": (5, 0), "softmax_scale": 0.4}
    plain = flash_attn.flash_attn_func(*qkv.unbind(2), **flags)
    expected = torch.autograd.grad(plain.square().sum(), qkv)[0]
    for out in (
        flash_attn.flash_attn_qkvpacked_func(qkv, **flags),
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **flags),
    ):
        assert_same_bits(out, plain, "out")
        assert_same_bits(torch.autograd.grad(out.square().sum(), qkv)[0], expected, "gradient")


@pytest.mark.parametrize(
    "window",
    [
        torch.tensor([3, 2]),
        torch.tensor([3, 2], dtype=torch.int32),
        (torch.tensor(3), torch.tensor(2)),
        (np.int64(3), np.int32(2)),
        [3, torch.tensor([2])],
    ],
    ids=str,
)
def test_windows_in_tensors(window: Any) -> None:
    q, k, v = (draw(2, rows, 2, 8).detach() for rows in (13, 19, 19))
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(3, 2))
    assert_same_bits(flash_attn.flash_attn_func(q, k, v, window_size=window), expected, "out")
    cache = {"cache_seqlens": 17, "causal": True}
    assert_same_bits(
        flash_attn.flash_attn_with_kvcache(q, k, v, **cache, window_size=window),
        flash_attn.flash_attn_with_kvcache(q, k, v, **cache, window_size=(3, 2)),
        "out of a cache",
    )


LENGTHS = ((5, 9), (0, 4), (7, 0), (12, 12), (0, 0), (3, 17))


def cu_seqlens() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return tuple(torch.nn.functional.pad(lengths.cumsum(0), (0, 0, 1, 0)).int().unbind(1))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_packed_sequences(flags: Flags, dtype: torch.dtype) -> None:
    q, k, v = (draw(rows, heads, 20, dtype=dtype) for rows, heads in ((27, 4), (42, 2), (42, 2)))
    slopes = slopes_of(flags, len(LENGTHS), 4)
    packed = cu_seqlens()
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *packed, 12, 17, **words(flags, slopes), return_attn_probs=True
    )
    check(
        (out, lse),
        {"q": q, "k": k, "v": v},
        lambda kind: attend_packed(q, k, v, LENGTHS, flags, slopes, kind),
        dtype,
    )


def test_packed_forms_of_sequences_are_the_plain_call() -> None:
    qkv, cu = draw(14, 3, 2, 8), torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    plain = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 9, 9, causal=True)
    q, kv = qkv[:, 0], qkv[:, 1:]
    for out in (
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 9, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 9, 9, causal=True),
    ):
        assert_same_bits(out, plain, "out")


def test_dropout_repeats_and_its_signs_say_what_was_dropped() -> None:
    q, k, v = (draw(2, *sizes, 16) for sizes in ((21, 4), (33, 2), (33, 2)))
    flags = Flags(causal=True, softcap=2.0, alibi="2-D")
    slopes = slopes_of(flags, 2, 4)
    said = {**words(flags, slopes), "dropout_p": 0.3}

    def call(seed: int, **more: bool) -> Any:
        torch.manual_seed(seed)
        return flash_attn.flash_attn_func(q, k, v, **said, **more)

    out, lse, signed = call(5, return_attn_probs=True)
    assert signed.shape == (2, 4, 21, 33)
    assert_same_bits(call(5), out, "the same seed")
    assert not torch.equal(call(6), out)
    kept = ~torch.signbit(signed)
    assert 0.6 < kept.float().mean() < 0.8
    _, _, p = attend(q, k, v, flags, slopes, torch.float64)
    _, _, near = attend(q, k, v, flags, slopes, torch.float32)
    assert_exact(signed.abs(), near, p, "probabilities")
    check(
        (out, lse),
        {"q": q, "k": k, "v": v},
        lambda kind: attend(q, k, v, flags, slopes, kind, kept, 0.3),
        torch.float32,
    )


def test_dropout_of_packed_sequences() -> None:
    q, k, v = (draw(rows, heads, 20) for rows, heads in ((27, 4), (42, 2), (42, 2)))
    packed = cu_seqlens()
    torch.manual_seed(3)
    out, _, signed = flash_attn.flash_attn_varlen_func(
        q, k, v, *packed, 13, 17, 0.25, causal=True, return_attn_probs=True
    )
    assert signed.shape == (len(LENGTHS), 4, 13, 17)
    m = n = 0
    for b, (rows, keys) in enumerate(LENGTHS):
        one = (q[None, m : m + rows], k[None, n : n + keys], v[None, n : n + keys])
        kept = ~torch.signbit(signed[b : b + 1, :, :rows, :keys])
        (near, *_), (true, *_) = (
            attend(*one, Flags(causal=True), None, kind, kept, 0.25)
            for kind in (torch.float32, torch.float64)
        )
        assert_exact(out[None, m : m + rows], near, true, f"sequence {b}")
        assert bool((signed[b, :, rows:] == 0).all())
        assert bool((signed[b, :, :, keys:] == 0).all())
        m, n = m + rows, n + keys
    with pytest.raises(InvalidArgument, match="max_seqlen_k"):
        flash_attn.flash_attn_varlen_func(
            q, k, v, *packed, 13, 16, 0.25, causal=True, return_attn_probs=True
        )


def test_the_lse_has_a_gradient() -> None:
    q, k = (draw(1, rows, 2, 8) for rows in (9, 5))
    _, lse, _ = flash_attn.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    finite = lse[..., 4:]
    got = torch.autograd.grad(finite.square().sum(), (q, k))

    def plain(kind: torch.dtype) -> tuple[Tensor, ...]:
        _, lse, _ = attend(q, k, k, Flags(causal=True), None, kind)
        return torch.autograd.grad(lse[..., 4:].square().sum(), (q, k))

    assert_all_exact(got, plain(torch.float32), plain(torch.float64), "qk", "gradient of ")


@pytest.mark.parametrize("page", [1, 3, 8])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_packed_queries_over_pages(flags: Flags, page: int) -> None:
    q, k, v = (draw(rows, heads, 20).detach() for rows, heads in ((27, 4), (42, 2), (42, 2)))
    packed, slopes = cu_seqlens(), slopes_of(flags, len(LENGTHS), 4)
    slots = -(-17 // page)
    order = torch.randperm(len(LENGTHS) * slots, generator=torch.Generator().manual_seed(1))
    table = order.view(len(LENGTHS), slots).int()
    pages = torch.full((2, len(order), page, 2, 20), math.nan)
    starts = packed[1].tolist()
    for b, (_, keys) in enumerate(LENGTHS):
        for n in range(keys):
            place = int(table[b, n // page]), n % page
            pages[0][place], pages[1][place] = k[starts[b] + n], v[starts[b] + n]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, *pages, *packed, 12, 17, **words(flags, slopes), return_attn_probs=True,
        block_table=table,
    )  # fmt: skip
    expected, its = (
        attend_packed(q, k, v, LENGTHS, flags, slopes, kind)
        for kind in (torch.float32, torch.float64)
    )
    assert_exact(out, expected[0], its[0], "out")
    assert_exact(lse, expected[1], its[1], "lse")


def test_under_torch_compile() -> None:
    q, k, v = (draw(2, rows, 4, 16) for rows in (9, 13, 13))
    slopes = torch.rand(4)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        said = {"causal": True, "window_size": (4, 0), "softcap": 3.0, "alibi_slopes": slopes}
        return flash_attn.flash_attn_func(q, k, v, **said)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, expected = compiled(q, k, v), call(q, k, v)
    assert_same_bits(out, expected, "out")
    for one, two in zip(
        *(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)), strict=True
    ):
        assert_same_bits(one, two, "gradient")


Q, CU = torch.zeros(1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("said", "kind", "names"),
    [
        ({"q": Q[0]}, InvalidArgument, "q"),
        ({"k": [1]}, InvalidType, "k"),
        ({"k": Q[:, :, :, :4]}, InvalidArgument, "k"),
        ({"v": Q[:, :3]}, InvalidArgument, "v"),
        ({"k": Q.double()}, InvalidArgument, "k"),
        ({"window_size": 3}, InvalidType, "window_size"),
        ({"window_size": (3,)}, InvalidArgument, "window_size"),
        ({"window_size": (None, None)}, InvalidType, "window_size"),
        ({"window_size": (True, 3)}, InvalidType, "window_size"),
        ({"window_size": (1.0, 3)}, InvalidType, "window_size"),
        ({"window_size": torch.tensor([1, 2, 3])}, InvalidArgument, "window_size"),
        ({"window_size": torch.tensor([1.0, 2.0])}, InvalidArgument, "window_size"),
        ({"window_size": torch.tensor(3)}, InvalidArgument, "window_size"),
        ({"window_size": (torch.tensor(1.5), 3)}, InvalidType, "window_size"),
        ({"softcap": None}, InvalidType, "softcap"),
        ({"softcap": math.nan}, InvalidArgument, "softcap"),
        ({"softcap": math.inf}, InvalidArgument, "softcap"),
        ({"softmax_scale": "a"}, InvalidType, "softmax_scale"),
        ({"softmax_scale": math.nan}, InvalidArgument, "softmax_scale"),
        ({"dropout_p": 1.0}, InvalidArgument, "dropout_p"),
        ({"alibi_slopes": torch.zeros(3)}, InvalidArgument, "alibi_slopes"),
        ({"alibi_slopes": torch.zeros(2, dtype=torch.int32)}, InvalidArgument, "alibi_slopes"),
        ({"alibi_slopes": 0.5}, InvalidType, "alibi_slopes"),
    ],
)
def test_mistakes_name_the_argument(
    said: dict[str, Any], kind: type[TilewiseError], names: str
) -> None:
    with pytest.raises(kind, match=rf"^{names}: got"):
        flash_attn.flash_attn_func(**{"q": Q, "k": Q, "v": Q, **said})


def test_mistakes_of_packed_calls() -> None:
    q = Q[0]
    with pytest.raises(InvalidArgument, match=r"^qkv"):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 4, 2, 2, 8))
    with pytest.raises(InvalidArgument, match=r"^cu_seqlens_q"):
        flash_attn.flash_attn_varlen_func(q, q, q, CU[None], CU, 4, 4)
    with pytest.raises(InvalidArgument, match=r"^cu_seqlens_k"):
        flash_attn.flash_attn_varlen_func(q, q, q, CU, CU + CU, 4, 4)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(Unsupported, match="dropout_p"):
        flash_attn.flash_attn_varlen_func(q, Q, Q, CU, CU, 4, 4, 0.1, block_table=table)
    with pytest.raises(InvalidArgument, match=r"^block_table"):
        flash_attn.flash_attn_varlen_func(q, Q, Q, CU, CU, 4, 4, block_table=table + 7)
    for said, name in (
        ({"cu_seqlens_q": CU - CU}, "cu_seqlens_q"),
        ({"cu_seqlens_q": CU.float()}, "cu_seqlens_q"),
        ({"cu_seqlens_k": CU + CU}, "cu_seqlens_k"),
        ({"cu_seqlens_k": -CU}, "cu_seqlens_k"),
    ):
        lengths = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, **said}
        with pytest.raises(InvalidArgument, match=f"^{name}: got"):
            flash_attn.flash_attn_varlen_func(
                q, Q, Q, **lengths, max_seqlen_q=4, max_seqlen_k=4, block_table=table
            )


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes"])
def test_a_gradient_over_pages_is_refused_when_it_is_asked_for(name: str) -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    given = {"q": Q[0], "k": Q + 1, "v": Q + 2, "alibi_slopes": torch.ones(2)}
    given[name] = given[name].clone().requires_grad_()
    said = {**given, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4}
    call = flash_attn.flash_attn_varlen_func
    out, lse, _ = call(**said, block_table=table, return_attn_probs=True)
    with torch.no_grad():
        bare = call(**said, block_table=table, return_attn_probs=True)
    for found, expected in ((out, bare[0]), (lse, bare[1])):
        assert found.requires_grad
        assert not expected.requires_grad
        assert_same_bits(found.detach(), expected, "with a gradient wanted")
        with pytest.raises(Unsupported, match=f"^{name} requires a gradient, and attention over"):
            torch.autograd.grad(found.sum(), given[name], retain_graph=True)
