"""compat.flex_attention: torch's numbers, gradients where torch has none, and refusals."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

import tilewise
from tests.contract import assert_all_exact, assert_exact
from tests.plain import attend
from tilewise.compat import flex_attention as door
from tilewise.compat.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)
from tilewise.errors import InvalidArgument, InvalidType, Unsupported

B, H, HK, M, N, D, DV = 2, 4, 2, 70, 150, 8, 5
DOCUMENTS = torch.arange(N) // 40


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx - 20


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (kv_idx + h > 2)


def few(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Some rows see nothing."""
    return (kv_idx < 3 * b) & (q_idx != 7)


MODS: dict[str, Any] = {"none": None, "causal": causal, "documents": documents, "few": few}


def relative(bias: Tensor, slopes: Tensor) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score / 3) * 3 + bias[h, q_idx - kv_idx + N] - slopes[b] * kv_idx

    return score_mod


def build(dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value, and the two tensors that ``relative`` reads."""
    generator = torch.Generator().manual_seed(8)
    shapes = ((B, H, M, D), (B, HK, N, D), (B, HK, N, DV), (H, M + N), (B,))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    drawn[4] = drawn[4] * 0.01
    return [x.to(dtype).requires_grad_() for x in drawn]


def plain(leaves: list[Tensor], mask_mod: Any, scored: bool) -> list[Tensor]:
    """Output, logsumexp and largest score, written out."""
    q, k, v, *captured = leaves
    rows = attend(q, k, v, score=relative(*captured) if scored else None, mask=mask_mod)
    return [rows.out, rows.lse, rows.max_logit]


def gradients(found: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    loss = torch.zeros((), dtype=found[0].dtype)
    for at, x in enumerate(found[:2]):
        generator = torch.Generator().manual_seed(9 + at)
        weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        loss = loss + torch.where(x.isfinite(), x * weights, 0).sum()
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def ours(leaves: list[Tensor], block_mask: Any, scored: bool) -> list[Tensor]:
    q, k, v, *captured = leaves
    score_mod = relative(*captured) if scored else None
    request: Any = AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=request)
    assert not aux.max_scores.requires_grad
    return [out, aux.lse, aux.max_scores]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("maker", [create_block_mask, torchs.create_block_mask])
def test_numbers_and_gradients(name: str, scored: bool, maker: Callable[..., Any]) -> None:
    mod = MODS[name]
    leaves = build(torch.float32)
    block_mask = None if mod is None else maker(mod, B, H, M, N, device="cpu", BLOCK_SIZE=32)
    found = ours(leaves, block_mask, scored)
    same = plain(leaves, mod, scored)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = plain(wide, mod, scored)
    for what, got, theirs, exact in zip(("out", "lse", "max"), found, same, truth, strict=True):
        assert_exact(got.detach(), theirs, exact, what)
    of_ours, of_plain, of_truth = (
        gradients(x, y) for x, y in ((found, leaves), (same, leaves), (truth, wide))
    )
    assert_all_exact(of_ours, of_plain, of_truth, "qkvbs", "gradient of ")


def torchs_own(*args: Any, **keywords: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        return torchs.flex_attention(*args, **keywords)


def test_torchs_function_says_the_same() -> None:
    q, k, v, bias, slopes = (x.detach() for x in build(torch.float32))
    block_mask = create_block_mask(few, B, H, M, N, device="cpu", BLOCK_SIZE=32)
    request: Any = torchs.AuxRequest(lse=True, max_scores=True)
    inputs = (q, k, v, relative(bias, slopes), block_mask, 0.4, True)
    only: Any = torchs.AuxRequest(lse=True)  # torch has no largest scores on the CPU
    want, aux = torchs_own(*inputs, return_aux=only)
    got, ours_aux = flex_attention(*inputs, return_aux=request)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours_aux.lse, aux.lse)
    assert flex_attention(*inputs, return_aux=only)[1].max_scores is None
    out, lse = flex_attention(*inputs, return_lse=True)
    assert torch.equal(out, got)
    assert torch.equal(lse, ours_aux.lse)


@pytest.mark.parametrize("apart", [True, False])
def test_block_masks_are_torchs(apart: bool) -> None:
    # torch 2.11 has no such option.
    names = inspect.signature(torchs.create_block_mask).parameters
    option: Any = {"separate_full_blocks": apart} if "separate_full_blocks" in names else {}
    joined = {
        "and": (and_masks(causal, documents), torchs.and_masks(causal, documents)),
        "or": (or_masks(causal, few), torchs.or_masks(causal, few)),
        "all": (and_masks(), torchs.and_masks()),
        "nothing": (or_masks(), torchs.or_masks()),
        "noop": (torchs.noop_mask, torchs.noop_mask),
    }
    for name, (own, other) in joined.items():
        sizes = (B, H, M, N)
        found = create_block_mask(
            own, *sizes, device="cpu", BLOCK_SIZE=(32, 16), separate_full_blocks=apart
        )
        want = torchs.create_block_mask(other, *sizes, device="cpu", BLOCK_SIZE=(32, 16), **option)
        assert torch.equal(found.to_dense(), want.to_dense()), name
        counts = want.kv_num_blocks
        if not apart and not option:  # that torch always has them apart
            assert want.full_kv_num_blocks is not None
            counts = counts + want.full_kv_num_blocks
        assert torch.equal(found.kv_num_blocks, counts), name
        assert found.mask_mod is own
        assert found.shape == want.shape
        assert torch.equal(torchs.create_mask(own, *sizes, device="cpu"),
                           torchs.create_mask(other, *sizes, device="cpu"))  # fmt: skip


def test_a_build_for_gpus_without_one_makes_tables_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pip's default torch is such a build, and names the accelerator that it was built for."""

    def named(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)
    assert create_block_mask(causal, 1, 1, M, N).kv_indices.device.type == "cpu"


def test_a_block_mask_is_read_once_and_again_when_it_changes() -> None:
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    limits = torch.tensor([30, 60])

    def read(block_mask: Any) -> Any:
        return door._mask_of(block_mask, M, None, (B, H))

    def below(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < limits[b]

    block_mask = torchs.create_block_mask(below, B, H, M, N, device="cpu", BLOCK_SIZE=32)
    first = read(block_mask)
    assert read(block_mask) is first
    limits[0] = 20  # inside of the same block, so that torch's lists stay right
    second = read(block_mask)
    assert second is not first
    got = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    want = tilewise.attention(q, k, v, mask=below)
    torch.testing.assert_close(got, want)
    block_mask.mask_mod = causal
    third = read(block_mask)
    assert third is not second
    block_mask.seq_lengths = (M, N - 8)
    assert read(block_mask) is not third
    made = create_block_mask(causal, 1, 1, M, N, device="cpu")
    assert read(made) is read(made)
    assert read(tilewise.BlockMask.of(causal, M, N)).program


def test_only_present_blocks_are_computed() -> None:
    """A key that only absent blocks have may hold NaN, and costs nothing."""
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    k[:, :, 64:] = math.nan
    v[:, :, 64:] = math.nan
    block_mask = create_block_mask(
        lambda b, h, m, n: n < 64, None, None, M, N, device="cpu", BLOCK_SIZE=64
    )
    assert flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True).isfinite().all()


def test_lists_that_serve_all_heads_beside_a_mask_mod_that_tells_them_apart() -> None:
    """``mask_mod`` is asked of each item and head, in the partial blocks alone, as in a graph."""
    q, k, v, *_ = (x.detach() for x in build(torch.float64))
    table = torch.tensor([[1, 0, 1, 2], [2, 1, 0, 0], [0, 1, 2, 1]])
    lists = []
    for cover in (1, 2):
        named = (table == cover).to(torch.int32)[None, None]
        lists += [named.sum(-1, dtype=torch.int32), named.sort(dim=-1, descending=True)[1].int()]

    def odd(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (n + m + h) % (b + 2) == 0

    make: Any = torchs.BlockMask.from_kv_blocks
    block_mask = make(*lists, BLOCK_SIZE=(32, 40), mask_mod=odd, seq_lengths=(M, N))
    covers = table.repeat_interleave(32, 0).repeat_interleave(40, 1)[:M, :N]
    for batch, heads in ((B, H), (1, H), (1, 2), (B, H)):
        given = q[:batch, :heads], k[:batch], v[:batch]
        got = flex_attention(*given, block_mask=block_mask, enable_gqa=True)
        seen = lambda b, h, m, n: ((covers == 1) & odd(b, h, m, n)) | (covers == 2)  # noqa: E731
        torch.testing.assert_close(got, attend(*given, mask=seen).out)


def test_one_batch_of_keys() -> None:
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    block_mask = create_block_mask(few, B, H, M, N, device="cpu")
    got = flex_attention(q, k[:1], v[:1], block_mask=block_mask, enable_gqa=True)
    want = torchs_own(q, k[:1], v[:1], block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_the_empty_block_mask_is_for_any_lengths(rows: int, compiled: bool) -> None:
    torch.compiler.reset()
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    empty = torchs._create_empty_block_mask(q, k)
    inputs = (q[:, :, :rows], k, v, None, empty)
    ours_compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    got = (ours_compiled if compiled else flex_attention)(*inputs, enable_gqa=True)
    torch.testing.assert_close(got, torchs_own(*inputs, enable_gqa=True))


def moved(mask_mod: Any, offset: int | Tensor) -> Any:
    """The mask of rows that count from ``offset``, as who decodes writes it."""

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx + offset, kv_idx)

    return mod


def slices_are_packed(whole: Any) -> bool:
    """Whether a slice is a mask of as many rows as its blocks have, as from torch 2.15 on.

    Then torch and we want exactly these rows of query, or the slice's ``seq_lengths`` set. An older
    slice still says how long the whole mask was.
    """
    return whole[:, :, 0].shape[-2] == whole.BLOCK_SIZE[0]


@pytest.mark.parametrize("said", [False, True], ids=["lengths as sliced", "lengths set"])
@pytest.mark.parametrize("name", ["causal", "documents", "few"])
def test_slices_of_a_block_mask_decode(name: str, said: bool) -> None:
    """Query by query, each with the row of blocks that it is in."""
    mod, block = MODS[name], 32
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    whole = torchs.create_block_mask(mod, B, H, M, N, device="cpu", BLOCK_SIZE=block)
    expected = plain([q, k, v, *build(torch.float32)[3:]], mod, False)[0]
    for position in (0, 7, 31, 32, 69):
        index = position // block if said else torch.tensor([position // block])
        mask = whole[:, :, index]
        offset = torch.tensor(position) if said else position
        mask.mask_mod = moved(mod, offset)
        if said:
            mask.seq_lengths = (1, N)
        one = q[:, :, position : position + 1]
        if slices_are_packed(whole) and not said:
            with pytest.raises(RuntimeError, match="larger length"):
                torchs_own(one, k, v, block_mask=mask, enable_gqa=True)
            with pytest.raises(InvalidArgument, match=r"one for 32 queries.*seq_lengths"):
                flex_attention(one, k, v, block_mask=mask, enable_gqa=True)
            continue
        got = flex_attention(one, k, v, block_mask=mask, enable_gqa=True)
        torch.testing.assert_close(got, expected[:, :, position : position + 1])


def test_a_slice_is_for_the_rows_of_its_blocks_alone() -> None:
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    whole = torchs.create_block_mask(causal, B, H, M, N, device="cpu", BLOCK_SIZE=32)
    mask = whole[:, :, 0:2]
    with pytest.raises(RuntimeError, match="mask_mod from a sliced BlockMask"):  # torch's words
        flex_attention(q[:, :, :64], k, v, block_mask=mask, enable_gqa=True)
    mask.mask_mod = causal
    assert tilewise.BlockMask.from_flex(mask).queries == 64
    packed = slices_are_packed(whole)
    for rows in (64,) if packed else (33, 64):  # the table is read again for other rows
        got = flex_attention(q[:, :, :rows], k, v, block_mask=mask, enable_gqa=True)
        want = tilewise.attention(q[:, :, :rows], k, v, mask=causal)
        torch.testing.assert_close(got, want)
    made_for = "64 queries" if packed else "a slice of 2 blocks of 32 queries"
    said = f"one for {made_for} and 150 keys; required: one for"
    for rows in (32, 33, 65) if packed else (32, 65):
        with pytest.raises(InvalidArgument, match=said):
            flex_attention(q[:, :, :rows], k, v, block_mask=mask, enable_gqa=True)
    one = whole[1, 2:]  # of one batch item, and of two heads
    one.mask_mod = lambda b, h, m, n: causal(b + 1, h + 2, m, n)
    got = flex_attention(q[1:, 2:], k[1:, 1:], v[1:, 1:], block_mask=one, enable_gqa=True)
    want = tilewise.attention(q, k, v, mask=causal)[1:, 2:]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rows", [1, 31, 64])
@pytest.mark.parametrize("keys", [40, 64, 150])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_lists_may_say_more_than_the_lengths(rows: int, keys: int, compiled: bool) -> None:
    """Cropped by ``_adjust``, or by its lengths alone, as code that decodes does it."""
    torch.compiler.reset()
    step: Any = flex_attention
    if compiled:
        step = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    q, k, v = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    want = tilewise.attention(q, k, v, mask=causal)
    whole = torchs.create_block_mask(causal, B, H, M, N, device="cpu", BLOCK_SIZE=32)
    adjusted = whole._adjust(rows, keys)
    whole.seq_lengths = (rows, keys)
    for block_mask in (adjusted, whole):
        torch.testing.assert_close(step(q, k, v, None, block_mask, enable_gqa=True), want)


@pytest.mark.parametrize("forgets", [True, False])
def test_rounded_lengths_are_taken_only_where_torch_rounds_them(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11's ``_adjust`` does; elsewhere a mask for 160 keys is not one for 150."""
    monkeypatch.setattr(door, "_FORGETS", [forgets])
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    rounded = torchs.create_block_mask(causal, B, H, 96, 160, device="cpu", BLOCK_SIZE=32)
    if forgets:
        got = flex_attention(q, k, v, block_mask=rounded, enable_gqa=True)
        torch.testing.assert_close(got, tilewise.attention(q, k, v, mask=causal))
    wrong = [(60, N), (M, 120), (97, N)] + ([] if forgets else [(M, N)])
    for rows, keys in wrong:
        inputs = (torch.ones(B, H, rows, D), k[:, :, :keys], v[:, :, :keys])
        with pytest.raises(InvalidArgument, match="one for 96 queries and 160 keys; required"):
            flex_attention(*inputs, block_mask=rounded, enable_gqa=True)


def test_new_values_of_the_shape_of_an_index() -> None:
    """Of torch's own tests: what a position has is a shape, and new ones of it."""
    table = torch.ones(B, 1, M, N, dtype=torch.bool).tril(9)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        every = b.new_ones(size=(), dtype=torch.bool, device=b.device)
        return table[b, h.new_zeros(h.shape), q_idx, kv_idx] & every

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        some = h.new_empty(h.shape) * 0 + torch.zeros_like(h) + torch.full_like(score, 0.5)
        return score + table[b, h.new_zeros(h.shape), q_idx, kv_idx] * score.new_full((), 3) + some

    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    block_mask = create_block_mask(mask_mod, B, None, M, N, device="cpu", BLOCK_SIZE=32)
    want_mask = torchs.create_block_mask(mask_mod, B, None, M, N, device="cpu", BLOCK_SIZE=32)
    assert torch.equal(block_mask.to_dense(), want_mask.to_dense())
    got = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)
    torch.testing.assert_close(got, torchs_own(q, k, v, score_mod, want_mask, enable_gqa=True))


@pytest.mark.parametrize("name", ["causal", pytest.param("few", marks=pytest.mark.thorough)])
def test_compiled(name: str) -> None:
    leaves = build(torch.float32)
    block_mask = torchs.create_block_mask(MODS[name], B, H, M, N, device="cpu", BLOCK_SIZE=32)

    def step(*args: Any) -> Any:
        q, k, v, bias, slopes, mask = args
        return flex_attention(
            2 * q, k, v, relative(bias, slopes), mask, enable_gqa=True, return_lse=True
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found, want = compiled(*leaves, block_mask), step(*leaves, block_mask)
    torch.testing.assert_close(found, want)
    pairs = zip(gradients(list(found), leaves), gradients(list(want), leaves), strict=True)
    for got, exact in pairs:
        torch.testing.assert_close(got, exact)


def test_what_is_not_in_the_language_is_refused_by_name() -> None:
    q, k, v, *_ = (x.detach() for x in build(torch.float32))

    def branching(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score if q_idx > kv_idx else score * 2

    def sums(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return DOCUMENTS[q_idx].tolist() > kv_idx

    with pytest.raises(Unsupported, match=r"score_mod .*branching is not .*\n.*call torch"):
        flex_attention(q, k, v, branching, enable_gqa=True)
    with pytest.raises(Unsupported, match=r"mask_mod .*sums is not in the language"):
        create_block_mask(sums, None, None, M, N, device="cpu")
    with pytest.raises(Unsupported, match="compute_dq_write_order"):
        create_block_mask(causal, 1, 1, M, N, device="cpu", compute_dq_write_order=True)


def test_every_name_of_torchs_module_is_here() -> None:
    assert set(torchs.__all__) <= set(door.__all__)
    torchs_own: Any = torchs.flex_attention
    expected = inspect.signature(torchs_own).parameters
    found = inspect.signature(flex_attention).parameters
    assert [(x.name, x.kind, x.default) for x in found.values()] == [
        (x.name, x.kind, x.default) for x in expected.values()
    ]


def test_a_request_for_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later torch may know it."""

    class Later(NamedTuple):
        lse: bool = False
        max_scores: bool = False
        entropy: bool = False

    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    later: Any = Later(lse=True, entropy=True)
    with pytest.raises(InvalidType, match="return_aux: got a Later; required: an AuxRequest"):
        flex_attention(q, k, v, enable_gqa=True, return_aux=later)
    monkeypatch.setattr(door, "AuxRequest", Later)
    with pytest.raises(Unsupported, match="return_aux with entropy"):
        flex_attention(q, k, v, enable_gqa=True, return_aux=later)
    enough: Any = Later(lse=True)
    _, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=enough)
    assert aux.lse.shape == q.shape[:3]


def test_mistakes() -> None:
    q, k, v, *_ = (x.detach() for x in build(torch.float32))
    block_mask = create_block_mask(causal, 1, 1, M, N, device="cpu")
    with pytest.raises(InvalidArgument, match=r"2 heads for 4 of query.*enable_gqa=True"):
        flex_attention(q, k, v)
    with pytest.raises(InvalidArgument, match=r"query: got shape"):
        flex_attention(q[0], k, v)
    with pytest.raises(InvalidArgument, match="block_mask: got one for 70 queries and 150 keys"):
        flex_attention(q[:, :, :9], k, v, block_mask=block_mask, enable_gqa=True)
    with pytest.raises(InvalidArgument, match="one of the two"):
        flex_attention(q, k, v, enable_gqa=True, return_lse=True, return_aux=AuxRequest())
    with pytest.raises(InvalidArgument, match="kernel_options: got 'BLOCKS'"):
        flex_attention(q, k, v, enable_gqa=True, kernel_options={"BLOCKS": 3})
    flex_attention(q, k, v, enable_gqa=True, kernel_options={"fwd_BLOCK_M": 64})
    with pytest.raises(InvalidType, match="block_mask: got a str"):
        flex_attention(q, k, v, block_mask="mask", enable_gqa=True)
    with pytest.raises(InvalidType, match=r"mask_mods\[1\]: got a int"):
        and_masks(causal, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="k: got batch 1"):
        flex_attention(q, k[:1], v[:1], enable_gqa=True)
