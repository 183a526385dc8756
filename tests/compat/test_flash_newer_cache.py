"""flash_attn_with_kvcache of FlashAttention-3: what it has beyond that of flash-attn 2."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import plain
from tests.compat.flash_reference import Flags, rotate, seen_of
from tests.contract import assert_all_same_bits, assert_exact, assert_same_bits
from tilewise.compat.flash_attn import version_3
from tilewise.compat.flash_attn.arguments import read
from tilewise.compat.flash_attn.cache import Cache, More, attend, in_place, with_values
from tilewise.errors import InvalidArgument, InvalidType, TilewiseError, Unsupported
from tilewise.variants.float8 import FLOAT8

call: Any = version_3.flash_attn_with_kvcache  # called with dicts, some of them wrong
HEADS, KV_HEADS, WIDTH, VALUES, CAPACITY = 4, 2, 16, 24, 24
BEFORE = (9, 0, 14, 3)  # keys in the cache of each sequence
STARTS = (2, 0, 14, 0)  # padding on the left
ROTARY = (3, 7, 0, 12)  # positions that are not those of the cache
# Rows, and new keys, of each sequence: packed, and not. The second sequence has no key at all.
ROWS = {True: (3, 2, 0, 5), False: (3, 3, 3, 3)}
NEW = {True: (4, 0, 1, 6), False: (2, 2, 2, 2)}


class Asked(NamedTuple):
    """What a call has."""

    flags: Flags = Flags()
    packed_q: bool = False
    packed_new: bool = False
    new: bool = True
    page: int = 0
    leftpad: bool = False
    qv: bool = False
    rotary: str = ""  # "cache": from the cache's lengths on; "own": from ROTARY on
    chunk: int = 0
    latent: str = ""  # the parts of one cache, in this order


class Case(NamedTuple):
    """Each sequence's tensors, the tables of positions, and the call's arguments."""

    q: list[Tensor]
    qv: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    past: list[tuple[Tensor, Tensor]]
    tables: tuple[Tensor, Tensor]
    said: dict[str, Any]
    places: list[list[tuple[int, int]]]  # of each sequence's rows in the caches

    def rows(self, name: str, b: int, count: int) -> Tensor:
        """The first rows of a sequence in a cache."""
        found = [self.said[name][place] for place in self.places[b][:count]]
        return (
            torch.stack(found)
            if found
            else self.said[name].new_zeros(0, *self.said[name].shape[2:])
        )


def starts_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def build(asked: Asked, dtype: torch.dtype) -> Case:
    """Rows of the caches that no sequence has keys in hold NaN."""
    generator = torch.Generator().manual_seed(7)

    def draw(counts: tuple[int, ...], heads: int, width: int) -> list[Tensor]:
        return [torch.randn(n, heads, width, generator=generator).to(dtype) for n in counts]

    rows, new = ROWS[asked.packed_q], NEW[asked.packed_new] if asked.new else (0,) * 4
    q, qv = draw(rows, HEADS, WIDTH), draw(rows, HEADS, VALUES)
    k, v = draw(new, KV_HEADS, WIDTH), draw(new, KV_HEADS, VALUES)
    past = list(zip(draw(BEFORE, KV_HEADS, WIDTH), draw(BEFORE, KV_HEADS, VALUES), strict=True))
    angles = torch.rand(CAPACITY + 1, 6, generator=generator) * 6
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    size = asked.page or CAPACITY
    slots = -(-CAPACITY // size)
    order = torch.randperm(4 * slots + 3, generator=generator)[: 4 * slots].view(4, slots)
    both = torch.full((4 * slots + 3, size, KV_HEADS, WIDTH + VALUES), math.nan, dtype=dtype)
    split = VALUES if asked.latent == "vk" else WIDTH
    caches = [both[..., :split], both[..., split:]]
    caches = caches[::-1] if asked.latent == "vk" else caches
    caches = caches if asked.latent else [each.clone() for each in caches]
    places = [[(int(own[n // size]), n % size) for n in range(CAPACITY)] for own in order]
    for b, (start, tensors) in enumerate(zip(STARTS, past, strict=True)):
        for n in range(start if asked.leftpad else 0, BEFORE[b]):
            for cache, tensor in zip(caches, tensors, strict=True):
                cache[places[b][n]] = tensor[n]
    flags = asked.flags
    said: dict[str, Any] = {
        "q": torch.cat(q) if asked.packed_q else torch.stack(q),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cache_seqlens": torch.tensor(BEFORE, dtype=torch.int32),
        "page_table" if asked.page else "cache_batch_idx": order.int()
        if asked.page
        else order[:, 0],
        "causal": flags.causal,
        "window_size": flags.window_size,
        "softcap": flags.softcap,
        "softmax_scale": flags.softmax_scale,
        "attention_chunk": asked.chunk,
        "return_softmax_lse": True,
    }
    if asked.new:
        said |= {
            n: torch.cat(x) if asked.packed_new else torch.stack(x) for n, x in (("k", k), ("v", v))
        }
    if asked.packed_q:
        said |= {"cu_seqlens_q": starts_of(rows), "max_seqlen_q": max(rows)}
    if asked.packed_new:
        said["cu_seqlens_k_new"] = starts_of(new)
    if asked.leftpad:
        said["cache_leftpad"] = torch.tensor(STARTS, dtype=torch.int32)
    if asked.qv:
        said["qv"] = torch.cat(qv) if asked.packed_q else torch.stack(qv)
    if asked.rotary:
        said |= {"rotary_cos": tables[0], "rotary_sin": tables[1], "rotary_interleaved": False}
    if asked.rotary == "own":
        said["rotary_seqlens"] = torch.tensor(ROTARY, dtype=torch.int32)
    return Case(q, qv, k, v, past, tables, said, places)


def expected(case: Case, asked: Asked, b: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Out [M, Hq, Dv], lse [Hq, M] and rotated new keys of a sequence, by the plain formula."""
    q, k, flags = case.q[b], case.k[b], asked.flags
    rows = len(q)
    if asked.rotary:
        first = (ROTARY if asked.rotary == "own" else BEFORE)[b]
        local = flags.causal or max(flags.window_size) >= 0 or asked.chunk > 0
        own = first + torch.arange(rows) * int(local)
        cos, sin = case.tables
        q, k = (
            rotate(x[None], cos[at], sin[at], False)[0]
            for x, at in ((q, own), (k, first + torch.arange(len(k))))
        )
        near = dtype == case.q[b].dtype
        q, k = (x.to(dtype) for x in (q, k)) if near else (q, k)
    start = STARTS[b] if asked.leftpad else 0
    q, fresh = q.to(dtype), k.to(dtype)
    keys = torch.cat([case.past[b][0].to(dtype), fresh])[start:]
    values = torch.cat([case.past[b][1], case.v[b]]).to(dtype)[start:]
    seen = seen_of(rows, len(keys), flags)
    if asked.chunk:
        at = torch.arange(rows)[:, None] + len(keys) - rows
        seen &= torch.arange(len(keys))[None] // asked.chunk == at // asked.chunk
    wide_keys = keys
    if asked.qv:
        q, wide_keys = torch.cat([q, case.qv[b].to(dtype)], -1), torch.cat([keys, values], -1)
    found = plain.attend(
        *(x.transpose(0, 1)[None] for x in (q, wide_keys, values)),
        scale=flags.softmax_scale,
        score=lambda s, *_: flags.softcap * torch.tanh(s / flags.softcap) if flags.softcap else s,
        mask=lambda *_: seen,
    )
    return found.out[0].transpose(0, 1), found.lse[0], fresh


def of_sequence(asked: Asked, out: Tensor, lse: Tensor, b: int) -> tuple[Tensor, Tensor]:
    if not asked.packed_q:
        return out[b], lse[b]
    first = sum(ROWS[True][:b])
    rows = slice(first, first + ROWS[True][b])
    return out[rows], lse[:, rows]


WINDOW = Flags(causal=True, window_size=(7, -1), softcap=2.0, softmax_scale=0.3)
CASES = {
    "plain": Asked(),
    "qv": Asked(qv=True),
    "qv, causal": Asked(Flags(causal=True), qv=True, new=False),
    "packed q": Asked(Flags(causal=True), packed_q=True),
    "packed q, nothing new": Asked(Flags(causal=True), packed_q=True, new=False),
    "packed new keys": Asked(Flags(causal=True), packed_new=True),
    "rotary": Asked(rotary="cache"),
    "rotary from elsewhere": Asked(rotary="own"),
    "rotary from elsewhere, causal": Asked(Flags(causal=True), rotary="own"),
    "chunk": Asked(chunk=4),
    "chunk, causal": Asked(Flags(causal=True), chunk=4),
    "chunk, padding": Asked(Flags(causal=True), chunk=4, leftpad=True),
    "chunk, rotary": Asked(chunk=5, rotary="cache"),
    "qv, pages": Asked(Flags(causal=True), qv=True, page=5),
    "qv, latent": Asked(Flags(causal=True), qv=True, page=5, latent="vk"),
    "qv, latent the other way": Asked(WINDOW, qv=True, latent="kv"),
    "packed, rotary, pages": Asked(
        Flags(causal=True), packed_q=True, packed_new=True, rotary="cache", page=5
    ),
    "packed, rotary of one position": Asked(packed_q=True, packed_new=True, rotary="own", page=24),
    "all": Asked(WINDOW, True, True, True, 5, True, True, "own", 6),
    "all, latent": Asked(WINDOW, True, True, True, 5, True, True, "own", 6, "vk"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_plain_attention(name: str, dtype: torch.dtype) -> None:
    asked = CASES[name]
    case = build(asked, dtype)
    before = case.said["k_cache"].clone()
    out, lse = call(**case.said)
    assert lse.dtype == torch.float32
    written = set()
    for b, length in enumerate(BEFORE):
        near, wide = (expected(case, asked, b, x) for x in (dtype, torch.float64))
        for what, one, index in zip(
            ("out", "lse"), of_sequence(asked, out, lse, b), (0, 1), strict=True
        ):
            assert_exact(one, near[index].to(one.dtype), wide[index], f"{what} of sequence {b}")
        end = length + len(case.k[b])
        assert_exact(case.rows("k_cache", b, end)[length:], near[2], wide[2], f"keys of {b}")
        assert_same_bits(case.rows("v_cache", b, end)[length:], case.v[b], f"values of {b}")
        written |= set(case.places[b][length:end])
    for place in {(i, j) for i in range(len(before)) for j in range(before.shape[1])} - written:
        assert_same_bits(case.said["k_cache"][place], before[place], "what nobody wrote")


def test_a_row_without_keys_has_minus_infinity() -> None:
    """As in FlashAttention-3; flash-attn 2 has +inf."""
    case = build(CASES["packed new keys"], torch.float32)
    case.said["cache_seqlens"] = 0
    out, lse = call(**case.said)
    assert bool((lse[1] == -math.inf).all())
    assert not bool(out[1].any())


def test_a_latent_cache_is_not_copied() -> None:
    """And of another, only the blocks that the table names."""
    both = torch.randn(9, 4, 2, WIDTH + VALUES)
    k, v = both[..., VALUES:], both[..., :VALUES]
    q, qv = torch.randn(2, 3, 4, WIDTH), torch.randn(2, 3, 4, VALUES)
    table = torch.tensor([[5, 1], [0, 2**31 - 1]], dtype=torch.int32)
    cache = Cache(k, v, torch.tensor([8, 3]), table)
    wide, queries = with_values(cache, q, qv)
    assert wide.k.data_ptr() == both.data_ptr()
    assert_same_bits(wide.k, both, "keys")
    assert_same_bits(queries, torch.cat([qv, q], -1), "queries")
    copied, queries = with_values(Cache(k.clone(), v, torch.tensor([8, 3]), table), q, qv)
    assert copied.k.shape[0] == table.numel()
    assert_same_bits(copied.k[copied.table[0, 1]], both[1], "block")
    options = read(2, 4, 0.0, 0.2, True, (-1, -1), 0.0, None)
    one, other = (
        attend(x, c, options, {}) for x, c in ((torch.cat([qv, q], -1), wide), (queries, copied))
    )
    assert_same_bits(one.out, other.out, "out")


@pytest.mark.parametrize("leftpad", [False, True])
def test_chunks_that_a_gpu_reads_in_place(leftpad: bool) -> None:
    """The road of devices, which keeps the padding, here by the reference."""
    asked = Asked(Flags(causal=True), chunk=4, leftpad=leftpad, new=False)
    case = build(asked, torch.float32)
    starts = torch.tensor(STARTS) if leftpad else None
    said = case.said
    if leftpad:  # a device may read what lies before, if it is finite
        said["k_cache"].nan_to_num_()
        said["v_cache"].nan_to_num_()
    lengths, table = said["cache_seqlens"], said["cache_batch_idx"][:, None]
    cache = Cache(said["k_cache"], said["v_cache"], lengths, table, starts)
    options = read(4, HEADS, 0.0, None, True, (-1, -1), 0.0, None)
    got = in_place(said["q"], cache, options, None, "tiled", More(chunk=4))
    assert got.lse is not None
    for b in range(4):
        near, wide = (expected(case, asked, b, x) for x in (torch.float32, torch.float64))
        assert_exact(got.out[b], near[0], wide[0], f"out of {b}")
        assert_exact(got.lse[b], near[1], wide[1], f"lse of {b}")


# ---- float8


def quantised(asked: Asked) -> tuple[Case, dict[str, Tensor]]:
    """A case in float8 with descales of each sequence and head, and its call's arguments."""
    case = build(asked, torch.float32)
    for name in ("q", "k_cache", "v_cache", "k", "v"):
        if name in case.said:
            case.said[name] = case.said[name].to(FLOAT8)
    generator = torch.Generator().manual_seed(8)
    names = ("q_descale", "k_descale", "v_descale")
    descales = {name: torch.rand(4, KV_HEADS, generator=generator) + 0.5 for name in names}
    return case, descales


def scaled(case: Case, descales: dict[str, Tensor]) -> Case:
    """What the float8 numbers of a case stand for, in float64."""

    def wide(tensors: list[Tensor], name: str) -> list[Tensor]:
        if name not in descales:
            return [x.to(FLOAT8).double() for x in tensors]
        scales = descales[name].double()
        return [
            x.to(FLOAT8).double() * scales[b].repeat_interleave(x.shape[1] // KV_HEADS)[:, None]
            for b, x in enumerate(tensors)
        ]

    past = zip(
        wide([x for x, _ in case.past], "k_descale"),
        wide([x for _, x in case.past], "v_descale"),
        strict=True,
    )
    return case._replace(
        q=wide(case.q, "q_descale"),
        k=wide(case.k, "k_descale"),
        v=wide(case.v, "v_descale"),
        past=list(past),
    )


FLOAT8_CASES = {
    "rows": Asked(Flags(causal=True)),
    "pages": Asked(WINDOW, page=5, new=False),
    "packed": Asked(Flags(causal=True), True, True, True, 5, True, chunk=6),
}


@pytest.mark.parametrize("given", ["all", "none", "q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_descales(name: str, given: str) -> None:
    asked = FLOAT8_CASES[name]
    case, descales = quantised(asked)
    descales = {n: x for n, x in descales.items() if given in ("all", n)}
    out, lse = call(**case.said, **descales)
    assert out.dtype == torch.bfloat16
    truth = scaled(case, descales)
    for b in range(4):
        wide = expected(truth, asked, b, torch.float64)
        near = expected(truth, asked, b, torch.float32)
        own_out, own_lse = of_sequence(asked, out, lse, b)
        assert_exact(own_out, near[0].to(torch.bfloat16), wide[0], f"out of {b}")
        assert_exact(own_lse, near[1], wide[1], f"lse of {b}")
        end = BEFORE[b] + len(case.k[b])
        fresh = case.rows("k_cache", b, end)[BEFORE[b] :].float()
        assert torch.equal(fresh, case.k[b].to(FLOAT8).float())


def test_float8_that_a_gpu_reads_in_place() -> None:
    """The road of devices, whose kernels multiply float8, here by the reference."""
    asked = FLOAT8_CASES["rows"]._replace(new=False)
    case, descales = quantised(asked)
    said = case.said
    out, lse = call(**said, **descales)
    lengths, table = said["cache_seqlens"], said["cache_batch_idx"][:, None]
    cache = Cache(said["k_cache"], said["v_cache"], lengths, table)
    scales = {"q_scale": descales["q_descale"].repeat_interleave(2, 1)}
    scales |= {"k_scale": descales["k_descale"], "v_scale": descales["v_descale"]}
    options = read(4, HEADS, 0.0, None, True, (-1, -1), 0.0, None)
    got = in_place(said["q"], cache, options, None, "tiled", More(scales=scales))
    torch.testing.assert_close(got.out, out, rtol=0.05, atol=0.05)
    torch.testing.assert_close(got.lse, lse)


# ---- what is refused

ONES = torch.ones(4, KV_HEADS)
WRONG: dict[str, tuple[str, dict[str, Any], type[TilewiseError], str]] = {
    "width of qv": ("qv", {"qv": torch.zeros(4, 3, 4, 16)}, InvalidArgument, r"^qv: .*3, 4, 24\]"),
    "dtype of qv": ("qv", {"qv": torch.zeros(4, 3, 4, 24).half()}, InvalidArgument, "^qv: "),
    "rank of q": (
        "packed q",
        {"q": torch.zeros(1, 10, 4, 16)},
        InvalidArgument,
        r"^q: .*\[T, H, D\]",
    ),
    "no packed q": ("plain", {"cu_seqlens_q": starts_of((1, 2, 3, 4))}, InvalidArgument, "^q: "),
    "end of q": (
        "packed q",
        {"cu_seqlens_q": starts_of((3, 2, 0, 4))},
        InvalidArgument,
        "^cu_seqlens_q: got 9 as its last entry",
    ),
    "starts of q": (
        "packed q",
        {"cu_seqlens_q": [0, 10]},
        InvalidType,
        "^cu_seqlens_q: got a list",
    ),
    "no starts of q": (
        "packed q",
        {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)},
        InvalidArgument,
        "^cu_seqlens_q: got no entry",
    ),
    "sequences": (
        "packed new keys",
        {"cu_seqlens_k_new": starts_of((5, 6))},
        InvalidArgument,
        r"^cu_seqlens_k_new: got shape \(3,\); required: .*\[5\]",
    ),
    "falling starts": (
        "packed new keys",
        {"cu_seqlens_k_new": torch.tensor([0, 4, 3, 5, 11])},
        InvalidArgument,
        "^cu_seqlens_k_new: got 4 followed by 3",
    ),
    "rank of new keys": (
        "plain",
        {"cu_seqlens_k_new": starts_of((2, 2, 2, 2))},
        InvalidArgument,
        r"^k: .*\[T, H, D\]",
    ),
    "starts of nothing": (
        "qv, causal",
        {"cu_seqlens_k_new": starts_of((0, 0, 0, 0))},
        InvalidArgument,
        "^cu_seqlens_k_new: got a tensor; required: None without k",
    ),
    "no room for one": (
        "packed new keys",
        {"cache_seqlens": torch.tensor([20, 24, 23, 19])},
        InvalidArgument,
        r"^cache_seqlens: got 19 for sequence 3; required: in \[0, 18\].*6 are new",
    ),
    "positions without tables": (
        "plain",
        {"rotary_seqlens": torch.tensor(ROTARY)},
        InvalidArgument,
        "^rotary_seqlens: .*None without rotary_cos",
    ),
    "positions of others": (
        "rotary",
        {"rotary_seqlens": torch.tensor(ROTARY[:3])},
        InvalidArgument,
        r"^rotary_seqlens: .*\[4\]",
    ),
    "floating positions": (
        "rotary",
        {"rotary_seqlens": ONES[:, 0]},
        InvalidArgument,
        "^rotary_seqlens: ",
    ),
    "negative positions": (
        "rotary",
        {"rotary_seqlens": torch.tensor([3, -1, 0, 0])},
        InvalidArgument,
        "^rotary_seqlens: .*0 or more",
    ),
    "positions past the tables": (
        "rotary",
        {"rotary_seqlens": torch.tensor([3, 24, 0, 0])},
        InvalidArgument,
        "^rotary_cos: got 25 rows; required: a row for each position up to 25",
    ),
    "chunk": ("plain", {"attention_chunk": -1}, InvalidArgument, "^attention_chunk: "),
    "no chunk": ("plain", {"attention_chunk": 2.0}, InvalidType, "^attention_chunk: "),
    "descale": (
        "plain",
        {"k_descale": ONES},
        InvalidArgument,
        "^k_descale: got one for k of torch.float32",
    ),
    "shape of a descale": (
        "plain",
        {"v_descale": ONES[0]},
        InvalidArgument,
        r"^v_descale: .*\[4, 2\]",
    ),
    "page": (
        "qv, pages",
        {"page_table": torch.full((4, 5), 99)},
        InvalidArgument,
        "^page_table: ",
    ),
    "index and pages": (
        "qv, pages",
        {"cache_batch_idx": torch.arange(4)},
        InvalidArgument,
        "^cache_batch_idx: got a tensor with a page_table",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_writes_nothing(name: str) -> None:
    asked, wrong, kind, words = WRONG[name]
    case = build(CASES[asked], torch.float32)
    before = [case.said[cache].clone() for cache in ("k_cache", "v_cache")]
    with pytest.raises(kind, match=words):
        call(**case.said | wrong)
    after = [case.said[cache] for cache in ("k_cache", "v_cache")]
    assert_all_same_bits(tuple(after), tuple(before), "caches")


@pytest.mark.parametrize("name", ["qv", "rotary"])
def test_what_float8_has_not(name: str) -> None:
    case, _ = quantised(CASES[name])
    if name == "qv":
        case.said["qv"] = case.said["qv"].to(FLOAT8)
    before = case.said["k_cache"].clone()
    with pytest.raises(Unsupported, match="float8"):
        call(**case.said)
    assert torch.equal(case.said["k_cache"].view(torch.uint8), before.view(torch.uint8))


def test_a_gradient_of_qv_is_refused_when_it_is_asked_for() -> None:
    case = build(CASES["qv"], torch.float32)
    qv = case.said["qv"].requires_grad_()
    out, _ = call(**case.said)
    with pytest.raises(Unsupported, match=r"^qv requires a gradient, and attention over"):
        torch.autograd.grad(out.sum(), qv)
