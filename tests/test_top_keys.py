"""``top_keys``: exact, ties by the lowest key, in little memory, under torch.compile."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tests.peak import only_linux, printed
from tilewise import indexer as module
from tilewise import masks
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.serving.pages import quantised

BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 3, 75, 523, 8  # no multiple of any block
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
STORED = [torch.int8, torch.float8_e4m3fn]
LENGTHS = torch.tensor([KEYS - 9, 7])
SOME = torch.rand(BATCH, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(3)) < 0.3
MASKS: dict[str, Any] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(40),
    "lengths": masks.causal() & masks.lengths(LENGTHS),
    "function": lambda b, h, m, n: (m + n + b) % 3 != 0,
    "dense": SOME,
    "tiles": tilewise.BlockMask.of(masks.window(100, 3), ROWS, KEYS),
    "nothing": ~masks.lengths(torch.tensor([KEYS, KEYS])),
}


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, keys and strips in one block each, or in several."""
    if request.param == "many blocks":
        monkeypatch.setattr(module, "_CPU", module._Sizes(16, 64, 128))
        monkeypatch.setattr(module, "_STRIP_KEYS", 200)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weights of small whole numbers: every score is exact, and most are tied."""
    torch.manual_seed(7)
    shapes = [(BATCH, HEADS, ROWS, WIDTH), (BATCH, 1, KEYS, WIDTH), (BATCH, ROWS, HEADS)]
    queries, keys, weights = (torch.randint(-2, 3, shape).to(dtype) for shape in shapes)
    return queries, keys, weights.float() if dtype in STORED else weights


def key_scales() -> Tensor:
    """Factors [B, 1, N] of which some are equal, 0 or below 0."""
    few = torch.tensor([0.0, 0.1, 0.3, 0.7, -0.3])
    places = torch.randint(len(few), (BATCH, 1, KEYS), generator=torch.Generator().manual_seed(4))
    return few[places]


def all_scores(queries: Tensor, keys: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The formula in float64, [B, M, N]."""
    products = queries.double() @ keys.double().transpose(-1, -2)
    return torch.einsum("bhmn,bmh->bmn", (scale * products).relu(), weights.double())


def chosen(scores: Tensor, k: int, mask: Any) -> Tensor:
    """The k keys of each row by a stable sort of finite scores, [B, 1, M, k]."""
    batch, rows, keys = scores.shape
    seen = tilewise.visible_pairs(mask, rows, keys, batch=batch)[:, 0]
    order = torch.where(seen, scores, -math.inf).argsort(descending=True, stable=True)
    order[torch.arange(keys) >= seen.sum(2, keepdim=True)] = -1
    found = torch.full((batch, 1, rows, k), -1, dtype=torch.int32)
    found[:, 0, :, :keys] = order[..., :k]
    return found


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", DTYPES + STORED)
@pytest.mark.parametrize("name", MASKS)
def test_the_best_keys_are_exact_and_ties_go_to_the_lowest(name: str, dtype: torch.dtype) -> None:
    operands_ = operands(dtype)
    scores, mask = all_scores(*operands_, 1.0), MASKS[name]
    assert (scores == 0).float().mean() > 0.1
    for k in (1, 37, KEYS + 5):
        expected = chosen(scores, k, mask)
        found = tilewise.top_keys(*operands_, k, mask=mask, scale=1.0, return_scores=True)
        assert found.keys.dtype == torch.int32
        assert torch.equal(found.keys, expected)
        at = scores[:, None].gather(3, expected.clamp(0).long())
        at = torch.where(expected < 0, -math.inf, at)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert_same_bits(found.scores, at.to(wide), "scores")
    if name in ("lengths", "window", "dense"):
        assert (expected == -1).any()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_numbers_are_near_those_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    queries, keys = torch.randn(2, 4, 40, 64).to(dtype), torch.randn(2, 1, 300, 64).to(dtype)
    weights = torch.randn(2, 40, 4).to(dtype)
    scores = all_scores(queries, keys, weights, 64**-0.5)[:, None]
    found = tilewise.top_keys(queries, keys, weights, 25, return_scores=True)
    near = 1e-12 if dtype == torch.float64 else 1e-5
    at = scores.gather(3, found.keys.long())
    torch.testing.assert_close(found.scores.double(), at, rtol=near, atol=near)
    best = scores.topk(25).values
    torch.testing.assert_close(found.scores.double(), best, rtol=near, atol=near)
    assert (found.keys.long().sort().values.diff() > 0).all()  # no key twice
    if dtype == torch.float64:
        assert torch.equal(found.keys, chosen(scores[:, 0], 25, None))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [*STORED, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["none", "lengths", "dense"])
def test_scores_are_those_of_the_widened_keys_times_their_scales(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(11)
    most = 128 if dtype is torch.int8 else 16  # float8 has all whole numbers up to 16
    queries = torch.randint(-most, most, (BATCH, HEADS, ROWS, WIDTH)).to(dtype)
    keys = torch.randint(-most, most, (BATCH, 1, KEYS, WIDTH)).to(dtype)
    *_, weights = operands()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    # The sums over heads are whole numbers below 2^24, so a score is rounded once: by its scale.
    scores = all_scores(queries, keys, weights, 1.0).to(wide) * key_scales()
    assert (scores < 0).any()
    for k in (1, 37, KEYS):
        expected = chosen(scores, k, MASKS[name])
        found = tilewise.top_keys(
            queries,
            keys,
            weights,
            k,
            mask=MASKS[name],
            scale=1.0,
            key_scales=key_scales(),
            return_scores=True,
        )
        assert torch.equal(found.keys, expected)
        at = scores[:, None].gather(3, expected.clamp(0).long())
        assert_same_bits(found.scores, torch.where(expected < 0, -math.inf, at), "scores")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_float8_number_is_widened_exactly(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    for numbers in (every, every.T, every[::2, ::3]):
        assert_same_bits(module._widened(numbers, dtype), numbers.to(dtype), "numbers")


@pytest.mark.parametrize("storage", STORED)
def test_scales_of_queries_go_into_the_weights(storage: torch.dtype) -> None:
    torch.manual_seed(12)
    queries, q_scale = quantised(torch.randn(2, 4, 40, 64), storage)
    keys, k_scale = quantised(torch.randn(2, 1, 300, 64), storage)
    weights = torch.randn(2, 40, 4)
    wide = queries.double() * q_scale[..., None], keys.double() * k_scale[..., None]
    scores = all_scores(*wide, weights, 64**-0.5)[:, None]
    folded = weights * q_scale.transpose(1, 2)
    found = tilewise.top_keys(queries, keys, folded, 25, key_scales=k_scale, return_scores=True)
    at = scores.gather(3, found.keys.long())
    for due in (at, scores.topk(25).values):
        torch.testing.assert_close(found.scores.double(), due, rtol=1e-5, atol=1e-5)


def test_scales_of_any_strides_and_dtypes() -> None:
    queries, keys, weights = operands(torch.int8)
    scales = torch.randint(1, 4, (BATCH, 1, KEYS)).float()
    due = tilewise.top_keys(queries, keys, weights, 30, key_scales=scales, return_scores=True)
    strided = scales.repeat_interleave(2, 2)[..., ::2].requires_grad_()
    for each in (strided, scales.bfloat16(), scales.half(), scales.transpose(1, 2).mT):
        found = tilewise.top_keys(queries, keys, weights, 30, key_scales=each)
        assert torch.equal(found, due.keys)
    alike = scales[:, :, :1].expand(-1, -1, KEYS)
    found = tilewise.top_keys(queries, keys, weights, 30, key_scales=alike)
    assert torch.equal(found, tilewise.top_keys(queries, keys, weights, 30))
    wide = tilewise.top_keys(
        queries, keys, weights, 30, key_scales=scales.double(), return_scores=True
    )
    assert wide.scores.dtype == torch.float64
    torch.testing.assert_close(wide.scores.float(), due.scores)


def test_a_nan_scale_is_the_largest_unless_its_key_is_hidden() -> None:
    queries, keys, weights = operands(torch.float8_e4m3fn)
    scales = torch.ones(BATCH, 1, KEYS)
    scales[:, :, 200] = math.nan
    hidden = SOME.clone()
    hidden[..., 200] = False
    found = tilewise.top_keys(queries, keys, weights, 30, key_scales=scales)
    assert (found[..., 0] == 200).all()
    found = tilewise.top_keys(queries, keys, weights, KEYS, key_scales=scales, mask=hidden)
    assert torch.equal(found, tilewise.top_keys(queries, keys, weights, KEYS, mask=hidden))


@pytest.mark.parametrize("scale", [2.0, 0.0, -0.5])
def test_any_scale(scale: float) -> None:
    found = tilewise.top_keys(*operands(), 20, scale=scale)
    assert torch.equal(found, chosen(all_scores(*operands(), scale), 20, None))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_is_the_largest(dtype: torch.dtype) -> None:
    queries, keys = torch.ones(1, 1, 1, 1, dtype=dtype), torch.zeros(1, 1, 300, 1, dtype=dtype)
    at = {3: -math.nan, 280: math.nan, 150: math.inf, 299: 5.0, 40: 5.0, 1: -5.0}
    for n, value in at.items():
        keys[0, 0, n] = value
    found = tilewise.top_keys(queries, keys, torch.ones(1, 1, 1), 7, return_scores=True)
    assert found.keys.flatten().tolist() == [3, 280, 150, 40, 299, 0, 1]
    expected = torch.tensor([math.nan, math.nan, math.inf, 5, 5, 0, 0], dtype=dtype)
    assert_same_bits(found.scores.flatten(), expected, "scores")
    # A weight below 0 makes -inf of inf.
    found = tilewise.top_keys(queries, keys, -torch.ones(1, 1, 1), 300, return_scores=True)
    zeros = [n for n in range(300) if n not in at or n == 1]
    assert found.keys.flatten().tolist() == [3, 280, *zeros, 40, 299, 150]
    assert found.scores.flatten()[-1] == -math.inf


def test_zeros_of_both_signs_are_equal() -> None:
    queries, keys, weights = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 6, 1), -torch.ones(1, 1, 1)
    keys[0, 0, 1::2] = 1e-20  # their scores are below 0 by less than float32 has: -0.0
    found = tilewise.top_keys(queries, keys, weights, 6, scale=1e-30, return_scores=True)
    assert found.keys.flatten().tolist() == list(range(6))
    assert not found.scores.signbit().any()


def test_a_hidden_key_is_not_chosen_whatever_it_holds() -> None:
    queries, keys, weights = operands()
    expected = tilewise.top_keys(queries, keys, weights, KEYS, mask=SOME)
    bad = keys.clone()
    bad[0, 0, 200] = math.nan
    hidden = SOME.clone()
    hidden[:, :, :, 200] = False
    found = tilewise.top_keys(queries, bad, weights, KEYS, mask=hidden)
    clean = tilewise.top_keys(queries, keys, weights, KEYS, mask=hidden)
    assert not torch.equal(clean, expected)
    assert torch.equal(found, clean)


def test_strides_gradients_and_dtypes_of_each_operand() -> None:
    queries, keys, weights = operands()
    expected = tilewise.top_keys(queries, keys, weights, 30, mask=masks.causal())
    strided = queries.transpose(1, 2).contiguous().transpose(1, 2)
    cached = keys.repeat_interleave(2, 3)[..., ::2]
    turned = weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert not any(each.is_contiguous() for each in (strided, cached, turned))
    for each in (strided, cached, turned):
        each.requires_grad_()
    found = tilewise.top_keys(strided, cached, turned, 30, mask=masks.causal(), return_scores=True)
    assert torch.equal(found.keys, expected)
    assert not found.scores.requires_grad
    mixed = tilewise.top_keys(queries.bfloat16(), keys.half(), weights, 30, mask=masks.causal())
    assert torch.equal(mixed, expected)
    with torch.autocast("cpu", torch.bfloat16):
        exact = tilewise.top_keys(queries + 1 / 256, keys, weights, 30)
    assert torch.equal(exact, tilewise.top_keys(queries + 1 / 256, keys, weights, 30))


def test_sizes_of_nothing_and_of_one() -> None:
    queries, keys, weights = operands()
    none = tilewise.top_keys(queries, keys[:, :, :0], weights, 3)
    assert none.shape == (BATCH, 1, ROWS, 3)
    assert (none == -1).all()
    assert tilewise.top_keys(queries[:, :, :0], keys, weights[:, :0], 3).shape == (BATCH, 1, 0, 3)
    assert tilewise.top_keys(queries[:0], keys[:0], weights[:0], 3).shape == (0, 1, ROWS, 3)
    last = tilewise.top_keys(queries[:, :, -1:], keys, weights[:, -1:], 9, mask=masks.causal())
    every = tilewise.top_keys(queries, keys, weights, 9, mask=masks.causal())
    assert torch.equal(last, every[:, :, -1:])


def test_the_number_of_threads_changes_no_bit() -> None:
    torch.manual_seed(9)
    tensors = torch.randn(1, 8, 100, 64), torch.randn(1, 1, 1500, 64), torch.randn(1, 100, 8)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found += [
            tilewise.top_keys(*tensors, 64, mask=mask, return_scores=True)
            for mask in (None, masks.causal())
        ]
    for first, other in zip(found[:2] * 2, found[2:], strict=True):
        assert torch.equal(first.keys, other.keys)
        assert_same_bits(first.scores, other.scores, "scores")


@pytest.mark.parametrize("dtype", [torch.float32, *STORED], ids=str)
def test_torch_compile_gives_the_same(dtype: torch.dtype) -> None:
    def call(
        queries: Tensor, keys: Tensor, weights: Tensor, lengths: Tensor, scales: Tensor | None
    ) -> Tensor:
        mask = masks.causal() & masks.lengths(lengths)
        return tilewise.top_keys(queries, keys, weights, 11, mask=mask, key_scales=scales)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    queries, keys, weights = operands(dtype)
    scales = key_scales() if dtype in STORED else None
    for rows in (ROWS, 20):
        some = queries[:, :, :rows], keys, weights[:, :rows], LENGTHS, scales
        assert torch.equal(compiled(*some), call(*some))


def test_the_op_is_well_formed() -> None:
    for dtype, scales in (
        (torch.float32, None),
        (torch.float64, None),
        (torch.int8, key_scales()),
        (torch.int8, key_scales().double()),
    ):
        for scores in (True, False):
            arguments = (*operands(dtype), scales, [LENGTHS], "below()[0]", 5, 1.0, scores)
            torch.library.opcheck(torch.ops.tilewise.top_keys.default, arguments)


def test_function_transforms_see_constants() -> None:
    queries, keys, weights = operands()

    def loss(queries: Tensor) -> Tensor:
        found = tilewise.top_keys(queries, keys, weights, 4, return_scores=True)
        return (queries.sum() * found.scores).sum()

    _, scores = tilewise.top_keys(queries, keys, weights, 4, return_scores=True)
    expected = scores.sum().expand(queries.shape)
    torch.testing.assert_close(torch.func.grad(loss)(queries), expected)
    with pytest.raises(Unsupported, match=r"no batching rule for torch\.func\.vmap"):
        torch.func.vmap(lambda x: tilewise.top_keys(x, keys, weights, 4))(queries[None])


MEMORY = """
import sys, torch, tilewise
from tests.peak import Peak
torch.set_num_threads(1)
dtype, rows, keys, k = getattr(torch, sys.argv[1]), 256, 8192, 64
queries, weights = torch.randn(1, 16, rows, 32).to(dtype), torch.randn(1, rows, 16)
cached = torch.randn(1, 1, keys, 32).to(dtype)
more = {"mask": tilewise.masks.causal(), "key_scales": torch.rand(1, 1, keys)}
call = lambda k: tilewise.top_keys(queries, cached, weights, k, **more)
few = [each[:, :, :64] for each in (queries, cached)]
tilewise.top_keys(*few, weights[:, :64], 8, mask=tilewise.masks.causal())
peak = Peak()
call(k)
print(peak.mib())
"""


@only_linux
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_memory_is_bounded(dtype: str) -> None:
    ((peak,),) = printed(MEMORY, dtype)
    # The products of all heads would be 128 MiB, and all scores 8 MiB.
    assert float(peak) < 14


def test_what_cannot_be_is_refused() -> None:
    (queries, keys, weights), scales = operands(), key_scales()
    call, table = tilewise.top_keys, torch.ones(HEADS, dtype=torch.bool)
    wrong: list[tuple[str, Any]] = [
        (r"queries: got shape \(3, 75, 8\)", lambda: call(queries[0], keys, weights, 3)),
        ("queries: got shape", lambda: call(queries[:, :0], keys, weights[..., :0], 3)),
        ("queries: got shape", lambda: call(queries[..., :0], keys[..., :0], weights, 3)),
        ("queries: got a tensor of torch.int64", lambda: call(queries.long(), keys, weights, 3)),
        (
            "queries: got a tensor of torch.float8_e5m2; required: a floating, int8 or float8_e4m3",
            lambda: call(queries.to(torch.float8_e5m2), keys, weights, 3),
        ),
        ("keys: got a tensor of torch.uint8", lambda: call(queries, keys.byte(), weights, 3)),
        (r"keys: got shape.*keys\[:, None\]", lambda: call(queries, keys[:, 0], weights, 3)),
        ("keys: got shape", lambda: call(queries, keys.expand(-1, 3, -1, -1), weights, 3)),
        ("keys: got shape", lambda: call(queries, keys[..., 1:], weights, 3)),
        ("keys: got shape", lambda: call(queries, keys[1:], weights, 3)),
        ("keys: got device meta", lambda: call(queries, keys.to("meta"), weights, 3)),
        ("weights: got shape.*transpose", lambda: call(queries, keys, weights.mT, 3)),
        ("weights: got a tensor of torch.bool", lambda: call(queries, keys, weights > 0, 3)),
        ("weights: got a tensor of torch.int8", lambda: call(queries, keys, weights.char(), 3)),
        (
            r"key_scales: got shape \(2, 523\).*key_scales\[:, None\]",
            lambda: call(queries, keys, weights, 3, key_scales=scales[:, 0]),
        ),
        (
            r"key_scales: got shape \(2, 523, 1\).*key_scales\.mT",
            lambda: call(queries, keys, weights, 3, key_scales=scales.mT),
        ),
        (
            "key_scales: got shape",
            lambda: call(queries, keys, weights, 3, key_scales=scales[..., 1:]),
        ),
        (
            "key_scales: got a tensor of torch.int8",
            lambda: call(queries, keys, weights, 3, key_scales=scales.char()),
        ),
        (
            "key_scales: got device meta",
            lambda: call(queries, keys, weights, 3, key_scales=scales.to("meta")),
        ),
        ("k: got 0", lambda: call(queries, keys, weights, 0)),
        ("scale: got nan", lambda: call(queries, keys, weights, 3, scale=math.nan)),
        ("scale: got 1e", lambda: call(queries, keys, weights, 3, scale=1e300)),
        (
            "mask: got a mask that depends on the head",
            lambda: call(queries, keys, weights, 3, mask=lambda b, h, m, n: table[h]),
        ),
        (
            "mask: got a mask that depends on the head",
            lambda: call(queries, keys, weights, 3, mask=SOME.expand(-1, HEADS, -1, -1)),
        ),
        ("mask: got shape", lambda: call(queries, keys, weights, 3, mask=SOME[..., 1:])),
        (
            r"mask \(lengths\): got the length 524",
            lambda: call(queries, keys, weights, 3, mask=masks.lengths(LENGTHS + 10)),
        ),
        (
            "mask: got the index 448",
            lambda: call(queries, keys, weights, 3, mask=lambda b, h, m, n: weights[0, n, 0] > 0),
        ),
    ]
    for message, refused in wrong:
        with pytest.raises(InvalidArgument, match=message):
            refused()
    with pytest.raises(InvalidType, match="keys: got a list"):
        call(queries, cast("Any", [1.0]), weights, 3)
    with pytest.raises(InvalidType, match="key_scales: got a float"):
        call(queries, keys, weights, 3, key_scales=cast("Any", 2.0))
    with pytest.raises(InvalidType, match="k: got a float"):
        call(queries, keys, weights, cast("Any", 2.0))
    with pytest.raises(InvalidType, match="mask: got the text 'causal'"):
        call(queries, keys, weights, 3, mask=cast("Any", "causal"))
