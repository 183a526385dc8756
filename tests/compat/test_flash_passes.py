"""flash-attn's passes by themselves: gradients, layouts, buffers, dropout, and rings over them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compat import extended
from tests.compat.flash_reference import Flags, attend, attend_packed, seen_of, slopes_of
from tests.compat.test_flash_interface import FLAGS, LENGTHS, check, cu_seqlens, draw, words
from tests.contract import assert_all_exact, assert_all_same_bits, assert_exact, assert_same_bits
from tilewise.compat.flash_attn import flash_attn_interface as interface
from tilewise.errors import InvalidArgument, InvalidType, TilewiseError, Unsupported

passes: Any = interface  # calls here are made of tuples and dicts, and some are wrong


def said_of(flags: Flags, slopes: Tensor | None) -> dict[str, Any]:
    """The flags under the names of the passes."""
    left, right = flags.window_size
    said = {**words(flags, slopes), "window_size_left": left, "window_size_right": right}
    del said["window_size"]
    return said


def forward(q: Tensor, k: Tensor, v: Tensor, said: dict[str, Any], **more: Any) -> Any:
    """out, lse, S_dmask and rng_state of whole tensors."""
    more = {"dropout_p": 0.0, "return_softmax": False, **more}
    return passes._flash_attn_forward(q, k, v, **{**said, **more})


def backward(call: tuple[Tensor, ...], said: dict[str, Any], **more: Any) -> list[Tensor]:
    """The gradients of q, k and v; ``call`` is dout, q, k, v, out and lse."""
    room = [torch.empty_like(x) for x in call[1:4]]
    more = {"dropout_p": 0.0, "deterministic": True, **more}
    passes._flash_attn_backward(*call, *room, **{**said, **more})
    return room


class Passes(torch.autograd.Function):
    """Attention by a forward and a backward pass; what is packed says so by its cu_seqlens."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, said: dict[str, Any], packing: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Out and lse."""
        name = "_flash_attn_varlen_forward" if packing else "_flash_attn_forward"
        forward = getattr(passes, name)
        out, lse, signed, ctx.state = forward(q, k, v, **packing, **said, return_softmax=False)
        assert signed.numel() == 0
        ctx.said, ctx.packing = said, packing
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> Any:
        """Gradients through buffers that are views of larger ones, whose rest stays as it was."""
        name = "_flash_attn_varlen_backward" if ctx.packing else "_flash_attn_backward"
        q, k, v, out, lse = ctx.saved_tensors
        wide = [torch.full((*x.shape[:-1], x.shape[-1] + 3), 7.0, dtype=x.dtype) for x in (q, k, v)]
        room = [x[..., 1:-2] for x in wide]
        rest = {"deterministic": False, "rng_state": ctx.state}
        delta = getattr(passes, name)(
            dout, q, k, v, out, lse, *room, **ctx.packing, **ctx.said, **rest
        )
        assert delta.shape[0] == (lse.shape[0] if not ctx.packing else q.shape[1])
        for x in wide:
            assert bool((x[..., 0] == 7).all())
            assert bool((x[..., -2:] == 7).all())
        return *room, None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_both_passes(flags: Flags, dtype: torch.dtype) -> None:
    sizes = ((13, 6, 24), (19, 2, 24), (19, 2, 16))
    q, k, v = (draw(2, *each, dtype=dtype) for each in sizes)
    slopes = slopes_of(flags, 2, 6)
    said = {**said_of(flags, slopes), "dropout_p": 0}
    got: Any = Passes.apply(q, k, v, said, {})
    assert got[1].shape == (2, 6, 13)
    expected = passes.flash_attn_func(q, k, v, **words(flags, slopes), return_attn_probs=True)
    for one, two, name in zip(got, expected, ("out", "lse"), strict=False):
        assert_same_bits(one, two, name)
    leaves = {"q": q, "k": k, "v": v}
    check(got, leaves, lambda kind: attend(q, k, v, flags, slopes, kind), dtype)


def test_float64() -> None:
    q, k, v = (
        draw(2, *each, dtype=torch.float64) for each in ((13, 6, 24), (19, 2, 24), (19, 2, 9))
    )
    got: Any = Passes.apply(q, k, v, {**said_of(Flags(causal=True), None), "dropout_p": 0.0}, {})
    assert [x.dtype for x in got] == [torch.float64] * 2
    weights = torch.randn_like(got[0])
    leaves = [x.transpose(1, 2) for x in (q, k, v)]
    seen = seen_of(13, 19, Flags(causal=True))
    out, *grads = extended.attend(leaves, seen, weights.transpose(1, 2), {"enable_gqa": True})
    near, *_ = attend(q, k, v, Flags(causal=True), None, torch.float64)
    assert_exact(got[0], near, out.swapaxes(1, 2), "out")
    its = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (got[0], near))
    for name, one, two, three in zip("qkv", *its, grads, strict=True):
        assert_exact(one, two, three.swapaxes(1, 2), f"gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_both_passes_of_packed_sequences(flags: Flags, dtype: torch.dtype) -> None:
    q, k, v = (draw(rows, heads, 20, dtype=dtype) for rows, heads in ((27, 4), (42, 2), (42, 2)))
    slopes = slopes_of(flags, len(LENGTHS), 4)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packing = dict(zip(names, (*cu_seqlens(), 12, 17), strict=True))
    got: Any = Passes.apply(q, k, v, {**said_of(flags, slopes), "dropout_p": 0.0}, packing)
    assert got[1].shape == (4, 27)
    check(
        got,
        {"q": q, "k": k, "v": v},
        lambda kind: attend_packed(q, k, v, LENGTHS, flags, slopes, kind),
        dtype,
    )


def test_large_logits_cost_no_accuracy() -> None:
    """The softmax is made again from lse: what it is rounded by once is lost, and nothing more."""
    q, k, v, dout = (draw(1, 200, 2, 64, seed=i).detach() * 6 for i in range(4))
    said = said_of(Flags(causal=True), None)
    out, lse, *_ = forward(q, k, v, said)
    assert float(lse.max()) > 100
    room = backward((dout, q, k, v, out, lse), said)

    def plain(kind: torch.dtype) -> list[Tensor]:
        g, x, y, z, o = (each.to(kind).transpose(1, 2) for each in (dout, q, k, v, out))
        s = (x @ y.mT) / 8
        seen = torch.ones(200, 200, dtype=torch.bool).tril()
        p = torch.exp(s - lse.to(kind)[..., None]).masked_fill(~seen, 0)
        ds = p * (g @ z.mT - (g * o).sum(-1, keepdim=True)) / 8
        return [found.transpose(1, 2) for found in (ds @ y, ds.mT @ x, p.mT @ g)]

    pairs = zip(room, plain(torch.float32), plain(torch.float64), "qkv", strict=True)
    for got, one, two, name in pairs:
        assert_exact(got, one, two, f"gradient of {name}")


def test_dropout_is_repeated_by_its_rng_state() -> None:
    q, k, v = (draw(2, *sizes, 16) for sizes in ((21, 4), (33, 2), (33, 2)))
    said, drops = said_of(Flags(causal=True), None), {"dropout_p": 0.3}
    out, lse, signed, state = forward(q, k, v, said, **drops, return_softmax=True)
    assert state.dtype == torch.int64
    assert state.shape == (2,)
    assert signed.shape == (2, 4, 21, 33)
    kept = ~torch.signbit(signed)
    dout = draw(2, 21, 4, 16, seed=9).detach()
    call = (dout, q, k, v, out, lse)
    room = backward(call, said, **drops, rng_state=state)

    def plain(kind: torch.dtype) -> tuple[Tensor, ...]:
        found, *_ = attend(q, k, v, Flags(causal=True), None, kind, kept, 0.3)
        return torch.autograd.grad((found * dout.to(kind)).sum(), (q, k, v))

    assert_all_exact(room, plain(torch.float32), plain(torch.float64), "qkv", "gradient of ")
    with pytest.raises(InvalidType, match=r"rng_state: got a NoneType; required: what the"):
        backward(call, said, **drops)
    with pytest.raises(InvalidArgument, match=r"rng_state: got a tensor of torch.int64, shape"):
        backward(call, said, **drops, rng_state=state[:1])


def test_softmax_d() -> None:
    q = draw(2, 13, 4, 8, dtype=torch.float64).detach()
    said = {**said_of(Flags(), None), "dropout_p": 0.25}
    out, lse, _, state = passes._flash_attn_forward(q, q, q, **said, return_softmax=False)
    dout = draw(2, 13, 4, 8, dtype=torch.float64, seed=1).detach()
    more = {**said, "deterministic": False, "rng_state": state}
    nothing = passes._flash_attn_backward(dout, q, q, q, out, lse, None, None, None, **more)
    assert nothing.shape == (2, 4, 128)
    expected = 0.75 * torch.einsum("bmhd,bmhd->bhm", dout, out)
    torch.testing.assert_close(nothing[..., :13], expected)
    assert not nothing[..., 13:].any()
    cu = torch.tensor([0, 5, 5, 13], dtype=torch.int32)
    packing = (cu, cu, 8, 8)
    out, lse, _, state = passes._flash_attn_varlen_forward(q[0], q[0], q[0], *packing, **said)
    call = (dout[0], q[0], q[0], q[0], out, lse, None, None, None, *packing)
    more["rng_state"] = state
    found = passes._flash_attn_varlen_backward(*call, **more)
    assert found.shape == (4, 13 + 3 * 128)
    expected = 0.75 * torch.einsum("mhd,mhd->hm", dout[0], out)
    torch.testing.assert_close(found[:, :5], expected[:, :5])
    torch.testing.assert_close(found[:, 5 + 256 : 13 + 256], expected[:, 5:])
    assert float(found.abs().sum()) == pytest.approx(float(expected.abs().sum()))


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_may_be_written_over_what_comes_in(packed: bool) -> None:
    """As there: softmax_d is that of dout, though dq or dk is the same memory."""
    q, dout = (draw(2, 13, 4, 8, seed=seed).detach() for seed in (0, 1))
    said: dict[str, Any] = {**said_of(Flags(), None), "dropout_p": 0.0}
    more: list[Any] = []
    if packed:
        q, dout, cu = q[0], dout[0], torch.tensor([0, 5, 13], dtype=torch.int32)
        more = [cu, cu, 8, 8]
    names = ("_flash_attn_varlen_" if packed else "_flash_attn_") + "{}"
    forward, backward = (getattr(passes, names.format(x)) for x in ("forward", "backward"))
    out, lse, *_ = forward(q, q, q, *more, **said, return_softmax=False)
    wanted = [torch.empty_like(q) for _ in range(3)]
    said["deterministic"] = False
    found = backward(dout, q, q, q, out, lse, *wanted, *more, **said)
    over = [dout.clone(), out.clone(), torch.empty_like(q)]
    again = backward(over[0], q, q, q, over[1], lse, *over, *more, **said)
    assert_all_same_bits([again, *over], [found, *wanted], "softmax_d and gradients")


def test_nan_stays_nan() -> None:
    q = draw(1, 9, 2, 8).detach()
    q[0, 4, 1, 2] = math.nan
    k = draw(1, 7, 2, 8).detach()
    said = said_of(Flags(), None)
    out, lse, *_ = forward(q, k, k, said)
    dq, dk, _ = backward((torch.ones_like(q), q, k, k, out, lse), said)
    assert bool(dq[0, 4, 1].isnan().all())
    assert bool(dk[0, :, 1].isnan().all())
    assert bool(dq[0, :4].isfinite().all())


def test_rows_without_keys_have_no_gradient() -> None:
    q, k = draw(1, 9, 2, 8).detach(), draw(1, 5, 2, 8).detach()
    said = said_of(Flags(causal=True), None)
    out, lse, *_ = forward(q, k, k, said)
    assert bool((lse[..., :4] == math.inf).all())
    dq, *_ = backward((torch.ones_like(q), q, k, k, out, lse), said)
    assert not dq[:, :4].any()
    assert bool(dq.isfinite().all())


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_keys_that_do_not_count(flags: Flags) -> None:
    """leftpad_k and seqused_k give what the keys that are left give alone."""
    q, k, v = (draw(rows, heads, 20).detach() for rows, heads in ((27, 4), (42, 2), (42, 2)))
    cu_q, cu_k = cu_seqlens()
    padding, used = torch.tensor([2, 0, 0, 3, 0, 16]), torch.tensor([7, 4, 0, 12, 0, 16])
    slopes = slopes_of(flags, len(LENGTHS), 4)
    said = {**said_of(flags, slopes), "dropout_p": 0.0}
    keys = [
        torch.arange(start + pad, start + end)
        for start, pad, end in zip(cu_k[:-1].tolist(), padding.tolist(), used.tolist(), strict=True)
    ]
    lengths = torch.tensor([0, *(len(each) for each in keys)], dtype=torch.int32)
    own = torch.cat(keys)
    hidden = torch.ones(42, dtype=torch.bool).index_fill(0, own, value=False)
    k[hidden], v[hidden] = math.nan, math.nan
    found = passes._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 12, 17, **said, leftpad_k=padding.int(), seqused_k=used.int()
    )
    cu = lengths.cumsum(0, dtype=torch.int32)
    expected = passes._flash_attn_varlen_forward(q, k[own], v[own], cu_q, cu, 12, 17, **said)
    torch.testing.assert_close(found[:2], expected[:2])
    table = torch.arange(len(LENGTHS) * 5).view(-1, 5).flip(0)
    pages = [torch.full((table.numel(), 4, 2, 20), math.nan) for _ in "kv"]
    for b, (start, end) in enumerate(zip(cu_k.tolist(), used.tolist(), strict=False)):
        for place in range(end):
            for held, packed in zip(pages, (k, v), strict=True):
                held[int(table[b, place // 4]), place % 4] = packed[start + place]
    counts = {"block_table": table.int(), "leftpad_k": padding, "seqused_k": used}
    paged = passes._flash_attn_varlen_forward(q, *pages, cu_q, cu_k, 12, 17, **said, **counts)
    torch.testing.assert_close(paged[:2], expected[:2])
    with pytest.raises(InvalidArgument, match="seqused_k: got"):
        passes._flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, 12, 17, **said, seqused_k=used.int() + 5
        )


def _merged(past: Any, rows: Any, out: Tensor, lse: Tensor) -> None:
    """Add a result over other keys to those of the rows so far, as the ranks of a ring do."""
    both = torch.logaddexp(past[1][rows], lse)
    past[0][rows] = past[0][rows] * (past[1][rows] - both).exp() + out.float() * (lse - both).exp()
    past[1][rows] = both


def _judged(
    out: Tensor, grads: list[Tensor], leaves: tuple[Tensor, ...], dout: Tensor, plain: Any
) -> list[tuple[Tensor, ...]]:
    """The output and the gradients of attention in blocks of keys, beside plain's and the true."""
    near, true = plain(out.dtype), plain(torch.float64)
    due = [torch.autograd.grad((x * dout.to(x.dtype)).sum(), leaves) for x in (near, true)]
    mine = (out, *(grad.to(out.dtype) for grad in grads))
    return list(zip(mine, (near, *due[0]), (true, *due[1]), strict=True))


def _assert_full(draws: list[list[tuple[Tensor, ...]]]) -> None:
    """The contract for draws as one problem: a ring rounds more often than plain attention."""
    for name, *of_draws in zip(("out", "dq", "dk", "dv"), *draws, strict=True):
        got, near, true = (torch.stack(each) for each in zip(*of_draws, strict=True))
        assert_exact(got, near, true, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_keys_are_full_attention(dtype: torch.dtype) -> None:
    """As in a ring: each backward pass takes the output and the lse of all keys of its rows."""
    _assert_full([_ring(dtype, 4 * draw) for draw in range(4)])


def _ring(dtype: torch.dtype, seed: int) -> list[tuple[Tensor, ...]]:
    q, k, v, dout = (
        draw(2, 64, heads, 16, dtype=dtype, seed=seed + i) for i, heads in enumerate((4, 2, 2, 4))
    )
    first, second = (slice(None), slice(32)), (slice(None), slice(32, 64))
    blocks = ((first, first, True), (second, first, False), (second, second, True))
    flags = Flags(causal=True, softmax_scale=0.3)
    said = said_of(flags, None)
    past = torch.zeros(2, 64, 4, 16), torch.full((2, 64, 4, 1), -torch.inf)
    for rows, keys, causal in blocks:
        found = forward(q[rows], k[keys], v[keys], said, causal=causal)
        _merged(past, rows, found[0], found[1].transpose(1, 2)[..., None])
    out, lse = past[0].to(dtype), past[1][..., 0].transpose(1, 2)
    sums = [torch.zeros(x.shape) for x in (q, k, v)]
    for rows, keys, causal in blocks:
        given = q[rows], k[keys], v[keys]
        call = (dout[rows], *given, out[rows], lse[:, :, rows[1]].contiguous())
        room = backward(call, said, causal=causal)
        for total, where, gradient in zip(sums, (rows, keys, keys), room, strict=True):
            total[where] += gradient.float()
    leaves = (q, k, v)
    return _judged(out, sums, leaves, dout, lambda kind: attend(*leaves, flags, None, kind)[0])


def test_packed_blocks_of_keys_are_full_attention() -> None:
    """Each of three ranks has a third of every sequence's keys."""
    lengths = [(5, 9), (12, 12), (3, 17)]
    q, dout = draw(20, 4, 16), draw(20, 4, 16, seed=9)
    k, v = draw(38, 2, 16, seed=1), draw(38, 2, 16, seed=2)
    cu_q = torch.tensor([0, 5, 17, 20], dtype=torch.int32)
    flags = Flags(softmax_scale=0.3)
    said = {**said_of(flags, None), "dropout_p": 0.0}
    blocks = []
    for rank in range(3):
        own = [keys.tensor_split(3)[rank] for keys in torch.arange(38).split([9, 12, 17])]
        counts = torch.tensor([0, *map(len, own)], dtype=torch.int32)
        blocks.append((torch.cat(own), counts.cumsum(0, dtype=torch.int32)))
    past = torch.zeros(20, 4, 16), torch.full((20, 4, 1), -torch.inf)
    for keys, cu in blocks:
        found = passes._flash_attn_varlen_forward(q, k[keys], v[keys], cu_q, cu, 12, 6, **said)
        _merged(past, ..., found[0], found[1].T[..., None])
    out, lse = past[0], past[1][..., 0].T.contiguous()
    sums = [torch.zeros(x.shape) for x in (q, k, v)]
    for keys, cu in blocks:
        given = q, k[keys], v[keys]
        room = [torch.empty_like(x) for x in given]
        passes._flash_attn_varlen_backward(
            *(dout, *given, out, lse, *room, cu_q, cu, 12, 6), **said, deterministic=True
        )
        sums[0] += room[0]
        sums[1][keys], sums[2][keys] = room[1:]

    def plain(kind: torch.dtype) -> Tensor:
        return attend_packed(q, k, v, lengths, flags, None, kind)[0]

    _assert_full([_judged(out, sums, (q, k, v), dout, plain)])


def test_a_gradient_through_a_pass_is_refused_when_it_is_asked_for() -> None:
    q = draw(1, 4, 2, 8)
    said = said_of(Flags(), None)
    out, lse, *_ = forward(q, q, q, said)
    for found in (out, lse):
        with pytest.raises(Unsupported, match="q requires a gradient, and _flash_attn_forward has"):
            found.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not forward(q, q, q, said)[0].requires_grad


def test_under_torch_compile() -> None:
    q, k, v = (draw(2, *sizes, 16) for sizes in ((9, 4), (13, 2), (13, 2)))
    dout, said = draw(2, 9, 4, 16, seed=9).detach(), said_of(Flags(causal=True, softcap=2.0), None)
    said |= {"dropout_p": 0.0, "alibi_slopes": torch.rand(4)}

    def both(q: Tensor, k: Tensor, v: Tensor) -> Any:
        room = [torch.empty_like(x) for x in (q, k, v)]
        out, lse, *_ = forward(q, k, v, said)
        call = (dout, q, k, v, out, lse, *room)
        return out, *room, passes._flash_attn_backward(*call, **said, deterministic=False)

    leaves = [x.detach() for x in (q, k, v)]
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert_all_same_bits(compiled(*leaves), both(*leaves), "compiled")


Q = torch.zeros(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("given", "kind", "names"),
    [
        ({"dout": Q[0]}, InvalidArgument, "dout"),
        ({"dout": Q[:, :3]}, InvalidArgument, "dout"),
        ({"out": Q.double()}, InvalidArgument, "out"),
        ({"softmax_lse": torch.zeros(1, 2, 5)}, InvalidArgument, "softmax_lse"),
        ({"softmax_lse": torch.zeros(1, 2, 4).int()}, InvalidArgument, "softmax_lse"),
        ({"softmax_lse": None}, InvalidType, "softmax_lse"),
        ({"dq": Q[:, :3]}, InvalidArgument, "dq"),
        ({"dk": Q.half()}, InvalidArgument, "dk"),
        ({"dv": 3}, InvalidType, "dv"),
        ({"k": Q[..., :4], "dk": None}, InvalidArgument, "k"),
        ({"window_size_left": None}, InvalidType, "window_size_left"),
        ({"window_size_right": torch.ones(2)}, InvalidType, "window_size_right"),
    ],
    ids=str,
)
def test_mistakes_name_the_argument(
    given: dict[str, Any], kind: type[TilewiseError], names: str
) -> None:
    call: dict[str, Any] = dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), Q)
    said = {**said_of(Flags(), None), "dropout_p": 0.0, "deterministic": False}
    lse = torch.zeros(1, 2, 4)
    with pytest.raises(kind, match=rf"^{names}: got"):
        passes._flash_attn_backward(**{**call, "softmax_lse": lse, **said, **given})


@pytest.mark.parametrize("packed", [False, True])
def test_windows_of_older_versions_are_told_what_is_required(packed: bool) -> None:
    """Before flash-attn 2.7 a window was one argument."""
    q, lse = (Q[0], torch.zeros(2, 4)) if packed else (Q, torch.zeros(1, 2, 4))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    name, packing = ("_varlen", (cu, cu, 4, 4)) if packed else ("", ())
    calls = {
        f"_flash_attn{name}_forward": (q, q, q, *packing),
        f"_flash_attn{name}_backward": (q, q, q, q, q, lse, q, q, q, *packing),
    }
    required = (
        r"^window_size_left: got a tuple; required: an integer, -1 for no bound\. "
        r"Flash-attn before 2\.7 takes both in one tuple, window_size\. Pass each by itself\.$"
    )
    last = ("return_softmax", "deterministic")
    for (call, given), flag in zip(calls.items(), last, strict=True):
        said = {**said_of(Flags(), None), "dropout_p": 0.0, flag: False}
        with pytest.raises(InvalidType, match=required):
            getattr(passes, call)(*given, **{**said, "window_size_left": (-1, -1)})
        with pytest.raises(TypeError, match=rf"{call}\(\) got an unexpected .* 'window_size'"):
            getattr(passes, call)(*given, **said, window_size=(-1, -1))


@pytest.mark.parametrize(
    ("caller", "refused"),
    [
        ("ring_flash_attn.zigzag_ring_flash_attn", True),
        ("yunchang.kernels.attention", True),
        ("ring_flash_attn.llama3_flash_attn_varlen", False),
        ("elsewhere", False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_is_refused_where_sums_would_be_overwritten(
    caller: str, refused: bool, dtype: torch.dtype
) -> None:
    theirs: dict[str, Any] = {"__name__": caller, "passes": passes}
    exec("def call(*given, **said): passes._flash_attn_backward(*given, **said)", theirs)
    q, said = Q.to(dtype), {**said_of(Flags(), None), "dropout_p": 0.0, "deterministic": False}
    given = (q, q, q, q, q, torch.zeros(1, 2, 4), None, None, None)
    if refused and dtype == torch.float32:
        with pytest.raises(Unsupported, match=f"float32 in a ring of {caller}: it adds up"):
            theirs["call"](*given, **said)
    else:
        theirs["call"](*given, **said)
