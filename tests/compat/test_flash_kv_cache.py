"""flash_attn_with_kvcache: appending, rotating, finding keys and attending to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.compat.flash_reference import Flags, attend, rotate, slopes_of
from tests.contract import assert_all_same_bits, assert_exact, assert_same_bits
from tilewise.compat import flash_attn as module
from tilewise.compat.flash_attn.arguments import read
from tilewise.compat.flash_attn.cache import Cache, in_place
from tilewise.errors import InvalidArgument, InvalidType, TilewiseError, Unsupported

flash_attn: Any = module  # calls here are made of tuples and dicts, and some are wrong
BATCH, HEADS, KV_HEADS, WIDTH = 3, 4, 2, 24
FLAGS = (
    Flags(),
    Flags(causal=True),
    Flags(window_size=(5, 1)),
    Flags(causal=True, window_size=(7, -1), softcap=2.0, alibi="2-D", softmax_scale=0.3),
    Flags(alibi="1-D"),
)
BEFORE = (9, 0, 14)  # keys in the cache of each sequence


class Case(NamedTuple):
    """A cache, and what is asked of it; a paged cache holds the same keys as the one in rows."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    said: dict[str, Any]

    def call(self, **more: Any) -> Any:
        """The call, over the tensors themselves."""
        tensors = (self.q, self.k_cache, self.v_cache, self.k, self.v)
        return flash_attn.flash_attn_with_kvcache(*tensors, **self.said, **more)


def draw(generator: torch.Generator, *sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes, generator=generator).to(dtype)


def build(
    rows: int = 2,
    new: int = 2,
    dtype: torch.dtype = torch.float32,
    caches: int = BATCH,
    capacity: int = 20,
    width: int = WIDTH,
) -> Case:
    """A case of caches in rows; rows that nobody wrote hold NaN."""
    generator = torch.Generator().manual_seed(rows + new)

    def tensor(*sizes: int) -> Tensor:
        return draw(generator, *sizes, dtype=dtype)

    k_cache, v_cache = (tensor(caches, capacity, KV_HEADS, width) for _ in "kv")
    k, v = (tensor(BATCH, new, KV_HEADS, width) if new else None for _ in "kv")
    said = {"cache_seqlens": torch.tensor(BEFORE, dtype=torch.int32)}
    return Case(tensor(BATCH, rows, HEADS, width), k_cache, v_cache, k, v, said)


def spoil(case: Case, where: list[int], starts: tuple[int, ...], ends: list[int]) -> None:
    """Put NaN into every row of the caches that no sequence has keys in."""
    for cache in (case.k_cache, case.v_cache):
        kept = cache.clone()
        cache.fill_(math.nan)
        for row, start, end in zip(where, starts, ends, strict=True):
            cache[row, start:end] = kept[row, start:end]


def keys_of(
    case: Case, where: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What ``check`` takes: of each sequence the rows of its cache from a start to an end."""
    rows = [(row, slice(*span)) for row, *span in zip(where, starts, ends, strict=True)]
    return [(case.k_cache[at], case.k_cache[at], case.v_cache[at]) for at in rows]


def check(
    got: tuple[Tensor, Tensor],
    q: tuple[Tensor, Tensor],
    keys: list[tuple[Tensor, Tensor, Tensor]],
    flags: Flags,
    slopes: Tensor | None,
) -> None:
    """The call against plain attention of each sequence: of ``q``, in the dtype and wide.

    ``keys`` has [N, Hk, D] of each sequence: k in the dtype, k wide, v.
    """
    for b, (near_k, wide_k, v) in enumerate(keys):
        own = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        near = attend(q[0][b : b + 1], near_k[None], v[None], flags, own, got[0].dtype)
        wide = attend(q[1][b : b + 1], wide_k[None], v[None], flags, own, torch.float64)
        for name, index in (("out", 0), ("lse", 1)):
            one = got[index][b : b + 1]
            assert_exact(one, near[index].to(one.dtype), wide[index], f"{name} of sequence {b}")


def flags_of(flags: Flags) -> tuple[dict[str, Any], Tensor | None]:
    slopes = slopes_of(flags, BATCH, HEADS)
    said = flags._asdict()
    del said["alibi"]
    return {**said, "alibi_slopes": slopes}, slopes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("new", [0, 1, 4])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_appends_and_attends(flags: Flags, new: int, dtype: torch.dtype) -> None:
    case = build(rows=3, new=new, dtype=dtype)
    spoil(case, [0, 1, 2], (0, 0, 0), list(BEFORE))
    before = case.k_cache.clone(), case.v_cache.clone()
    words, slopes = flags_of(flags)
    out, lse = case.call(**words, return_softmax_lse=True)
    for cache, old, fresh in zip(
        (case.k_cache, case.v_cache), before, (case.k, case.v), strict=True
    ):
        if fresh is not None:
            for b, length in enumerate(BEFORE):
                old[b, length : length + new] = fresh[b]
        assert_same_bits(cache, old, "cache")
    keys = keys_of(case, range(BATCH), (0, 0, 0), [length + new for length in BEFORE])
    check((out, lse), (case.q, case.q), keys, flags, slopes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 24, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotates(dtype: torch.dtype, rotary: int, interleaved: bool, causal: bool) -> None:
    case = build(rows=2, new=2, dtype=dtype)
    spoil(case, [0, 1, 2], (0, 0, 0), list(BEFORE))
    q, old_k = case.q.clone(), case.k_cache.clone()
    angles = torch.rand(20, rotary // 2, generator=torch.Generator().manual_seed(2)) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    said = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    got = case.call(**said, causal=causal, return_softmax_lse=True)
    assert_same_bits(case.q, q, "q")
    assert case.k is not None
    assert case.v is not None
    lengths = torch.tensor(BEFORE)[:, None]
    places = lengths + torch.arange(2)
    own = places if causal else lengths.expand(-1, 2)
    wide_q = rotate(q, cos[own], sin[own], interleaved)
    wide_k = rotate(case.k, cos[places], sin[places], interleaved)
    # In its dtype a rotation has four roundings; the plain one here has the one of its result.
    near_q, near_k = wide_q.to(dtype), wide_k.to(dtype)
    keys = []
    for b, length in enumerate(BEFORE):
        assert_exact(case.k_cache[b, length : length + 2], near_k[b], wide_k[b], "rotated k")
        assert_same_bits(case.v_cache[b, length : length + 2], case.v[b], "v")
        past = old_k[b, :length]
        v = case.v_cache[b, : length + 2]
        keys.append((torch.cat([past, near_k[b]]), torch.cat([past.double(), wide_k[b]]), v))
    check(got, (near_q, wide_q), keys, Flags(causal=causal), None)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_caches_by_index_and_left_padding(flags: Flags) -> None:
    case = build(rows=2, new=3, caches=5)
    where, starts = [4, 0, 2], (2, 0, 14)
    spoil(case, where, starts, list(BEFORE))
    case.said["cache_batch_idx"] = torch.tensor(where, dtype=torch.int32)
    case.said["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
    words, slopes = flags_of(flags)
    got = case.call(**words, return_softmax_lse=True)
    keys = keys_of(case, where, starts, [length + 3 for length in BEFORE])
    assert not any(k.isnan().any() for k, *_ in keys)
    check(got, (case.q, case.q), keys, flags, slopes)


@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("page", [1, 4, 7, 32])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_pages_hold_what_rows_hold(flags: Flags, page: int, leftpad: bool) -> None:
    case = build(rows=2, new=5)
    spoil(case, [0, 1, 2], (0, 0, 0), list(BEFORE))
    slots = -(-20 // page)
    order = torch.randperm(BATCH * slots + 1, generator=torch.Generator().manual_seed(4))
    table = order[: BATCH * slots].view(BATCH, slots)
    pages = [torch.full((len(order), page, KV_HEADS, WIDTH), math.nan) for _ in "kv"]
    for cache, own in zip((case.k_cache, case.v_cache), pages, strict=True):
        for b, length in enumerate(BEFORE):
            for n in range(length):
                own[int(table[b, n // page]), n % page] = cache[b, n]
    if leftpad:
        case.said["cache_leftpad"] = torch.tensor([2, 0, 14], dtype=torch.int32)
    words, _ = flags_of(flags)
    paged = case._replace(k_cache=pages[0], v_cache=pages[1])
    got = paged.call(**words, block_table=table.int(), return_softmax_lse=True)
    expected = case.call(**words, return_softmax_lse=True)
    assert_all_same_bits(got, expected, "out, lse")
    in_rows = [each[table].flatten(1, 2)[:, :20] for each in pages]
    assert_same_bits(in_rows[0], case.k_cache, "k")
    assert_same_bits(in_rows[1], case.v_cache, "v")


def test_lengths_as_a_number_or_not_at_all() -> None:
    case = build(rows=2, new=2)
    case.said["cache_seqlens"] = torch.full((BATCH,), 7, dtype=torch.int64)
    whole = case.k_cache.clone(), case.v_cache.clone()
    expected = case.call(causal=True)
    again = case._replace(k_cache=whole[0], v_cache=whole[1], said={"cache_seqlens": 7})
    assert_same_bits(again.call(causal=True), expected, "out")
    assert_same_bits(whole[0], case.k_cache, "cache")
    every = case._replace(k=None, v=None, said={"cache_seqlens": 20})
    unsaid = every._replace(said={})
    assert_same_bits(unsaid.call(), every.call(), "out")


def test_a_batch_of_one_length_is_the_calls_of_its_sequences() -> None:
    case = build(new=0)
    case.said["cache_seqlens"] = 13
    flags = Flags(causal=True, window_size=(7, -1), alibi="2-D")
    words, _ = flags_of(flags)
    own = torch.arange(BATCH, dtype=torch.int32)
    at_once = case.call(**words, return_softmax_lse=True)
    one_by_one = case.call(
        **words, return_softmax_lse=True, cache_leftpad=torch.zeros_like(own), cache_batch_idx=own
    )
    assert_all_same_bits(at_once, one_by_one, "out, lse")


def test_num_splits_changes_nothing() -> None:
    case = build(new=0)
    assert_same_bits(case.call(num_splits=3), case.call(), "out")


def test_one_sequence_is_the_same_alone() -> None:
    case = build(rows=1, new=1)
    out = case.call(causal=True)
    assert case.k is not None
    assert case.v is not None
    for b in range(BATCH):
        own = [x[b : b + 1] for x in (case.q, case.k_cache, case.v_cache, case.k, case.v)]
        length = case.said["cache_seqlens"][b : b + 1]
        alone = flash_attn.flash_attn_with_kvcache(*own, cache_seqlens=length, causal=True)
        assert_same_bits(alone, out[b : b + 1], f"sequence {b}")


def test_strided_caches_are_written_in_place() -> None:
    wide = torch.randn(BATCH, 2, 20, 2 * KV_HEADS, WIDTH)
    case = build()._replace(k_cache=wide[:, 0, :, ::2], v_cache=wide[:, 1, :, 1::2])
    packed = case._replace(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
    assert_same_bits(case.call(), packed.call(), "out")
    assert_same_bits(wide[:, 0, :, ::2], packed.k_cache, "cache")
    assert_same_bits(wide[:, 1, :, 1::2], packed.v_cache, "cache")


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_an_expanded_cache_is_read_and_never_written(name: str) -> None:
    """One prefix for all sequences, expanded: what one appends would be in the others' caches."""
    case = build()
    shared = getattr(case, name)[:1].expand(BATCH, -1, -1, -1)
    before = shared.clone()
    shared_case, own = case._replace(**{name: shared}), case._replace(**{name: before.clone()})
    with pytest.raises(InvalidArgument, match=rf"^{name}: got shape .* an expanded tensor"):
        shared_case.call()
    assert_same_bits(shared, before, name)
    shared_case, own = (each._replace(k=None, v=None) for each in (shared_case, own))
    assert_same_bits(shared_case.call(), own.call(), "out")


def test_left_padding_of_strided_caches() -> None:
    """Rows that lie unevenly, one sequence with nothing but padding, and starts beyond all rows."""
    wide = torch.randn(BATCH, 2, 20, KV_HEADS, WIDTH)
    case = build(new=0)._replace(k_cache=wide[:, 0], v_cache=wide[:, 1])
    starts = [3, 25, 14]
    spoil(case, [0, 1, 2], (3, 0, 14), [9, 0, 14])
    leftpad = torch.tensor(starts)
    out = case.call(causal=True, cache_leftpad=leftpad)
    packed = case._replace(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
    assert_same_bits(packed.call(causal=True, cache_leftpad=leftpad), out, "out")
    assert bool(out[0].isfinite().all())
    assert not bool(out[1:].any())


@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_what_a_gpu_reads_in_place(flags: Flags, leftpad: bool) -> None:
    """The road of devices, ``attention_paged`` over the cache, here by the reference."""
    case = build(rows=3, new=0)
    starts = torch.tensor([2, 0, 14]) if leftpad else None
    lengths, table = case.said["cache_seqlens"], torch.tensor([[0], [1], [2]])
    words, slopes = flags_of(flags)
    call = read(BATCH, HEADS, 0.0, **words)
    cache = Cache(case.k_cache, case.v_cache, lengths, table, starts)
    got = in_place(case.q, cache, call, backend="tiled")
    assert got.lse is not None
    first = [0] * BATCH if starts is None else starts.tolist()
    keys = keys_of(case, range(BATCH), first, BEFORE)
    lse = torch.where(got.lse == -math.inf, math.inf, got.lse)
    check((got.out, lse), (case.q, case.q), keys, flags, slopes)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_on_a_gpu(flags: Flags) -> None:
    case = build(rows=2, new=3, dtype=torch.bfloat16, caches=5)
    where, starts = [4, 0, 2], [2, 0, 14]
    case.said["cache_batch_idx"] = torch.tensor(where, dtype=torch.int32)
    case.said["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
    words, slopes = flags_of(flags)
    tensors = [x if x is None else x.cuda() for x in case[:5]]
    said = {
        name: x.cuda() if isinstance(x, Tensor) else x for name, x in {**case.said, **words}.items()
    }
    out, lse = flash_attn.flash_attn_with_kvcache(*tensors, **said, return_softmax_lse=True)
    case.call(**words)  # writes the caches here
    assert tensors[1] is not None
    assert_same_bits(tensors[1].cpu(), case.k_cache, "cache")
    keys = keys_of(case, where, starts, [length + 3 for length in BEFORE])
    check((out.cpu(), lse.cpu()), (case.q, case.q), keys, flags, slopes)


TABLE = torch.zeros(BATCH, 1, dtype=torch.int32)
ANGLES = torch.zeros(20, 4)


@pytest.mark.parametrize(
    ("said", "kind", "names"),
    [
        ({"q": torch.zeros(3, 4, 24)}, InvalidArgument, "q"),
        ({"v_cache": torch.zeros(3, 19, 2, 24)}, InvalidArgument, "v_cache"),
        ({"k_cache": torch.zeros(2, 20, 2, 24)}, InvalidArgument, "v_cache"),
        ({"k_cache": torch.zeros(3, 20, 2, 24).double()}, InvalidArgument, "k_cache"),
        ({"v_cache": torch.zeros(3, 20, 2, 24).half()}, InvalidArgument, "v_cache"),
        ({"q": torch.zeros(3, 2, 3, 24)}, InvalidArgument, "k_cache"),
        ({"q": torch.zeros(3, 2, 4, 16)}, InvalidArgument, "k_cache"),
        ({"k": None}, InvalidArgument, "k"),
        ({"v": None}, InvalidArgument, "v"),
        ({"k": torch.zeros(3, 2, 4, 24)}, InvalidArgument, "k"),
        ({"v": torch.zeros(3, 1, 2, 24)}, InvalidArgument, "v"),
        ({"k": torch.zeros(3, 2, 2, 24).double()}, InvalidArgument, "k"),
        ({"rotary_cos": ANGLES}, InvalidArgument, "rotary_sin"),
        ({"rotary_cos": ANGLES[:, 0], "rotary_sin": ANGLES}, InvalidArgument, "rotary_cos"),
        ({"rotary_cos": ANGLES, "rotary_sin": ANGLES[:, :2]}, InvalidArgument, "rotary_sin"),
        ({"rotary_cos": ANGLES[:19], "rotary_sin": ANGLES[:19]}, InvalidArgument, "rotary_cos"),
        (
            {"rotary_cos": ANGLES, "rotary_sin": ANGLES, "k": None, "v": None},
            InvalidArgument,
            "rotary_cos",
        ),
        ({"cache_seqlens": None}, InvalidArgument, "cache_seqlens"),
        ({"cache_seqlens": 19}, InvalidArgument, "cache_seqlens"),
        ({"cache_seqlens": -1}, InvalidArgument, "cache_seqlens"),
        ({"cache_seqlens": 2.0}, InvalidType, "cache_seqlens"),
        ({"cache_seqlens": torch.zeros(3)}, InvalidArgument, "cache_seqlens"),
        ({"cache_batch_idx": torch.tensor([0, 1, 3])}, InvalidArgument, "cache_batch_idx"),
        (
            {"cache_batch_idx": TABLE[:, 0], "block_table": TABLE},
            InvalidArgument,
            "cache_batch_idx",
        ),
        ({"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, InvalidArgument, "cache_leftpad"),
        ({"cache_leftpad": TABLE[:, 0] - 1}, InvalidArgument, "cache_leftpad"),
        ({"block_table": TABLE[:2]}, InvalidArgument, "block_table"),
        ({"block_table": TABLE - 1}, InvalidArgument, "block_table"),
        ({"block_table": TABLE + 3, "k": None, "v": None}, InvalidArgument, "block_table"),
        ({"num_splits": -1}, InvalidArgument, "num_splits"),
        ({"num_splits": None}, InvalidType, "num_splits"),
        ({"alibi_slopes": torch.zeros(2, 4)}, InvalidArgument, "alibi_slopes"),
    ],
    ids=str,
)
def test_mistakes_name_the_argument(
    said: dict[str, Any], kind: type[TilewiseError], names: str
) -> None:
    given = build()._asdict()
    given |= given.pop("said") | said
    with pytest.raises(kind, match=rf"^{names}: got"):
        flash_attn.flash_attn_with_kvcache(**given)


def test_a_mistake_writes_nothing() -> None:
    case = build()
    before = case.k_cache.clone()
    mistakes: tuple[dict[str, Any], ...] = (
        {"num_splits": -1},
        {"cache_seqlens": 19},
        {"softcap": None},
        {"v": case.q},
        {"block_table": TABLE - 1},
        {"cache_leftpad": TABLE[:, 0] - 1},
        {"q": case.q.double()},
        {"softmax_scale": math.nan},
        {"softmax_scale": 1e39},
        {"softcap": math.inf},
        {"softcap": 1e-39},
    )
    tensors = {name: x for name, x in case._asdict().items() if name != "said"}
    for said in mistakes:
        with pytest.raises(TilewiseError):
            flash_attn.flash_attn_with_kvcache(**{**tensors, **case.said, **said})
    assert_same_bits(case.k_cache, before, "cache")
    whole = [x.round().int() for x in case[:5] if x is not None]
    before = whole[1].clone()
    with pytest.raises(InvalidArgument, match=r"^q: got torch.int32; required: one of"):
        flash_attn.flash_attn_with_kvcache(*whole, **case.said)
    assert_same_bits(whole[1], before, "cache of integers")


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
def test_a_gradient_is_refused_when_it_is_asked_for(name: str, rotated: bool) -> None:
    case = build()
    if rotated:
        case.said.update(rotary_cos=ANGLES.cos(), rotary_sin=ANGLES.sin())
    with torch.no_grad():
        expected = case._replace(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone()).call()
    leaf = getattr(case, name).requires_grad_()
    found = case._replace(**{name: leaf}).call(return_softmax_lse=True)
    assert_same_bits(found[0].detach(), expected, "out")
    for each in found:
        with pytest.raises(Unsupported, match=rf"^{name} requires a gradient, and attention over"):
            torch.autograd.grad(each.sum(), leaf, retain_graph=True)
    with torch.no_grad():
        assert not case.call().requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("new", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_a_gradient_of_a_compiled_call_is_refused_when_it_is_asked_for(new: int) -> None:
    torch._dynamo.reset()
    case = build(new=new)

    def call(q: Tensor) -> Any:
        cached = (case.k_cache, case.v_cache, case.k, case.v)
        return flash_attn.flash_attn_with_kvcache(q, *cached, cache_seqlens=9)

    compiled = torch.compile(call, backend="aot_eager")
    expected = call(case.q)
    assert_same_bits(compiled(case.q), expected, "out")
    found = compiled(case.q.requires_grad_())
    assert_same_bits(found.detach(), expected, "out")
    with pytest.raises(Unsupported, match="q requires a gradient"):
        found.sum().backward()
