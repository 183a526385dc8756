"""The catalogue of variants: the references against plain torch, values and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tests.extended import extended, has_extended_precision
from tests.plain import attend_packed, joined
from tests.variants_catalogue import (
    CATALOGUE,
    Call,
    Sizes,
    Variant,
    assert_all_close,
)
from tilelab.cases.dense import dense
from tilewise.reference import blocks, tiles
from tilewise.reference.blocks import Walk
from tilewise.variants.values import as_score


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Several tiles of a small problem, and not whole numbers of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_WHOLE", 8)
        patch.setattr(blocks, "WALK", Walk(16, 16))
        yield


each_variant = pytest.mark.parametrize("variant", CATALOGUE, ids=str)


SIZES = (
    Sizes(),
    Sizes(1, 4, 1, 9),
    Sizes(2, 4, 33, 1),
    Sizes(2, 4, 0, 5),
    Sizes(3, 4, 5, 0),
    Sizes(0, 4, 5, 5),
)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
@each_variant
def test_the_references_are_plain_torch(variant: Variant, sizes: Sizes) -> None:
    """Several tiles; one row, one key, no rows, no keys, no batch."""
    call = Call(variant, torch.float64, sizes)
    expected = call.plain()
    assert_all_close(call.dense(torch.float64), expected)
    assert_all_close(call.run("tiled"), expected)


def captured_gradients(call: Call, grads: tuple[Any, ...]) -> dict[str, Tensor]:
    """Of the extended oracle, by the name of the captured tensor."""
    captured = () if call.made.score is None else as_score(call.made.score).captured
    return {
        name: torch.from_numpy(grad.astype("float64"))
        for tensor, grad in zip(captured, grads, strict=True)
        for name, leaf in call.made.captured.items()
        if leaf is tensor
    }


@pytest.mark.skipif(not has_extended_precision(), reason="longdouble is float64 here")
@each_variant
def test_the_extended_oracle_is_plain_torch(variant: Variant) -> None:
    """To the precision of float64; and the captured gradients are in it."""
    call = Call(variant, torch.float64)
    result = extended(*call.asked(), call.grad_out, call.grad_lse)
    assert result.grads is not None
    expected = call.plain()
    got = {"out": result.out, "lse": result.lse, **dict(zip("qkv", result.grads[:3], strict=True))}
    if result.grads.sinks is not None:
        got["sinks"] = result.grads.sinks
    doubles = {name: torch.from_numpy(grad.astype("float64")) for name, grad in got.items()}
    doubles |= captured_gradients(call, result.grads.score_tensors)
    assert_all_close(doubles, expected)


SINGLE = ("alibi", "t5", "swin", "learned-softcap", "kerple", "forgetting", "power", "everything")
each_single = pytest.mark.parametrize(
    "variant", [v for v in CATALOGUE if v.name in SINGLE], ids=str
)


@each_single
def test_captured_gradients_keep_their_bits(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of threads, and without torch's own deterministic algorithms."""
    call = Call(variant, torch.float32, Sizes(2, 4, 130, 170))
    monkeypatch.setattr(blocks, "WALK", Walk(128, 128))
    results = []
    torch.use_deterministic_algorithms(False)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(call.run("tiled"))
    finally:
        torch.use_deterministic_algorithms(True)
    for name, tensor in results[0].items():
        assert_same_bits(tensor, results[1][name], name)


LENGTHS = ((20, 31), (1, 1), (0, 4), (37, 17), (6, 0))


@each_variant
def test_b_is_the_sequence_of_a_variable_length_call(variant: Variant) -> None:
    """A packed call is each sequence by itself, with its own b."""
    sizes = Sizes(len(LENGTHS), 4, 37, 53)
    call = Call(variant, torch.float64, sizes)
    starts_q, starts_k = (
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        for lengths in zip(*LENGTHS, strict=True)
    )
    q, k, v = (
        torch.cat([leaf[i, :, : rows[where]] for i, rows in enumerate(LENGTHS)], dim=1)
        for leaf, where in zip(call.qkv, (0, 1, 1), strict=True)
    )
    packed = (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    parts = attend_packed(*packed, (starts_q, starts_k), **call.formula)
    out, lse = joined(parts, packed[0], packed[2])[:2]
    call.grad_out = torch.linspace(-1, 1, out.numel()).double().view(out.shape)
    call.grad_lse = torch.linspace(-1, 1, lse.numel()).double().view(lse.shape)
    expected = call.results(out, lse)
    out, lse, _ = tilewise.attention_varlen(*packed, starts_q, starts_k, **call.keywords("tiled"))
    assert_all_close(call.results(out, lse), expected)
    asked = call.asked(packed, (starts_q, starts_k))
    result = dense(*asked)
    assert_all_close(call.results(result.out, result.lse), expected)
    if not has_extended_precision():
        return
    oracle = extended(*asked, call.grad_out, call.grad_lse)
    assert oracle.grads is not None
    for name, grad in captured_gradients(call, oracle.grads.score_tensors).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9)


def test_what_only_hidden_pairs_load_does_not_leak() -> None:
    """NaN in a table, for keys after the row: results and gradients are as with zeros there."""
    relative = next(variant for variant in CATALOGUE if variant.name == "relative")
    causal = next(variant for variant in CATALOGUE if variant.name == "causal")
    variant = relative._replace(mask=causal.mask)
    results = []
    for filler in (0.0, float("nan")):
        call = Call(variant, torch.float64)
        call.made.captured["table"].data[:, : Sizes().keys - 1] = filler
        results += [call.dense(torch.float64), call.run("tiled")]
    for result in results[1:]:
        assert_all_close(result, results[0])
    assert not bool(results[-1]["table"][:, : Sizes().keys - 1].any())
    assert bool((results[-1]["table"][:, Sizes().keys - 1 :] != 0).any())
