"""The catalogue of variants: the references against plain torch, values and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_exact, assert_same_bits
from tests.variants_catalogue import CATALOGUE, Sizes, Variant, plain_attention
from tilewise.problem import Operands, Problem, dense_problem, lower_sinks
from tilewise.reference import tiles
from tilewise.reference.dense import dense
from tilewise.reference.extended import extended, has_extended_precision
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.values import as_mask, as_score

SIZES = Sizes()
WIDTH = 8
SCALE = 0.4


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Several tiles of a small problem, and not whole numbers of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_WHOLE", 8)
        patch.setattr(tiles, "QUERY_TILE", 16)
        patch.setattr(tiles, "KEY_TILE", 16)
        yield


class Call:
    """The tensors of one call of a variant."""

    def __init__(self, variant: Variant, dtype: torch.dtype, sizes: Sizes = SIZES) -> None:
        generator = torch.Generator().manual_seed(3)

        def leaf(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(dtype).requires_grad_()

        self.made = variant.make(sizes, dtype)
        self.leaves = {
            "q": leaf(sizes.batch, sizes.heads, sizes.queries, WIDTH),
            "k": leaf(sizes.batch, 2, sizes.keys, WIDTH),
            "v": leaf(sizes.batch, 2, sizes.keys, WIDTH),
            **self.made.captured,
        }
        if variant.sinks:
            self.leaves["sinks"] = leaf(sizes.heads)
        self.grad_out = leaf(sizes.batch, sizes.heads, sizes.queries, WIDTH).detach()
        self.grad_lse = leaf(sizes.batch, sizes.heads, sizes.queries).detach()

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.leaves["q"], self.leaves["k"], self.leaves["v"]

    def results(self, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """out, lse and the gradient of every leaf, by name."""
        grads = torch.autograd.grad(
            [out, lse],
            list(self.leaves.values()),
            [self.grad_out.to(out.dtype), self.grad_lse.to(lse.dtype)],
            materialize_grads=True,  # an empty captured tensor may not be in the graph
        )
        found = {"out": out.detach(), "lse": lse.detach()}
        return found | dict(zip(self.leaves, grads, strict=True))

    def plain(self) -> dict[str, Tensor]:
        return self.results(
            *plain_attention(*self.qkv, self.made, scale=SCALE, sinks=self.leaves.get("sinks"))
        )

    def keywords(self) -> dict[str, Any]:
        return {
            "mask": self.made.mask,
            "score": self.made.score,
            "scale": SCALE,
            "sinks": self.leaves.get("sinks"),
            "return_lse": True,
            "backend": "tiled",
        }

    def tiled(self) -> dict[str, Tensor]:
        out, lse, _ = tilewise.attention(*self.qkv, **self.keywords())
        return self.results(out, lse)

    def asked(self) -> tuple[Problem, Operands]:
        q, k, v = self.qkv
        mask = None if self.made.mask is None else as_mask(self.made.mask)
        score = None if self.made.score is None else as_score(self.made.score)
        sinks = self.leaves.get("sinks")
        problem = dense_problem(
            q,
            k,
            v,
            mask=() if mask is None else mask.program,
            score=() if score is None else score.program,
            scale=SCALE,
            dropout_p=0.0,
            sinks=sinks,
        )
        extent = Extent(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        mask_tensors: tuple[Tensor, ...] = ()
        score_tensors: tuple[Tensor, ...] = ()
        if mask is not None:
            mask_tensors = lower_mask(mask.program, mask.captured, extent, q.device, q.dtype)
        if score is not None:
            score_tensors = lower_score(score.program, score.captured, extent, q.dtype, q.device)
        return problem, Operands(q, k, v, mask_tensors, score_tensors, lower_sinks(sinks, q.dtype))

    def dense(self, dtype: torch.dtype) -> dict[str, Tensor]:
        result = dense(*self.asked(), dtype=dtype)
        return self.results(result.out, result.lse)


def assert_all_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        message = f"{name}: {got[name]} and {tensor}"
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-9, msg=message)


each_variant = pytest.mark.parametrize("variant", CATALOGUE, ids=str)


@each_variant
def test_the_dense_reference_is_plain_torch(variant: Variant) -> None:
    call = Call(variant, torch.float64)
    assert_all_close(call.dense(torch.float64), call.plain())


@each_variant
def test_the_tiled_reference_is_plain_torch(variant: Variant) -> None:
    call = Call(variant, torch.float64)
    assert_all_close(call.tiled(), call.plain())


ODD = (
    Sizes(1, 4, 1, 9),
    Sizes(2, 4, 33, 1),
    Sizes(2, 4, 0, 5),
    Sizes(3, 4, 5, 0),
    Sizes(0, 4, 5, 5),
)


@pytest.mark.parametrize("sizes", ODD, ids=lambda sizes: "x".join(map(str, sizes)))
@each_variant
def test_odd_sizes(variant: Variant, sizes: Sizes) -> None:
    """One row, one key, no rows, no keys, no batch."""
    call = Call(variant, torch.float64, sizes)
    expected = call.plain()
    assert_all_close(call.dense(torch.float64), expected)
    assert_all_close(call.tiled(), expected)


@pytest.mark.skipif(not has_extended_precision(), reason="longdouble is float64 here")
@each_variant
def test_the_extended_oracle_is_plain_torch(variant: Variant) -> None:
    """To the precision of float64; and the captured gradients are in it."""
    call = Call(variant, torch.float64)
    result = extended(*call.asked(), call.grad_out, call.grad_lse)
    assert result.grads is not None
    expected = call.plain()
    got = {"out": result.out, "lse": result.lse, **dict(zip("qkv", result.grads[:3], strict=True))}
    if call.made.score is not None:
        score = as_score(call.made.score)
        for tensor, grad in zip(score.captured, result.grads.score_tensors, strict=True):
            names = [name for name, leaf in call.leaves.items() if leaf is tensor]
            if names:
                got[names[0]] = grad
    if result.grads.sinks is not None:
        got["sinks"] = result.grads.sinks
    as_doubles = {name: torch.from_numpy(grad.astype("float64")) for name, grad in got.items()}
    assert_all_close(as_doubles, expected)


SINGLE = ("alibi", "t5", "swin", "learned-softcap", "kerple", "forgetting", "power", "everything")


@pytest.mark.parametrize("variant", [v for v in CATALOGUE if v.name in SINGLE], ids=str)
def test_the_tiled_reference_is_exact_in_float32(variant: Variant) -> None:
    """The contract, with the captured gradients in it."""
    call = Call(variant, torch.float32)
    wide = Call(variant, torch.float64)
    for name, leaf in wide.leaves.items():
        leaf.data.copy_(call.leaves[name].data)
    wide.grad_out, wide.grad_lse = call.grad_out.double(), call.grad_lse.double()
    got, plain, oracle = call.tiled(), call.dense(torch.float32), wide.plain()
    for name, tensor in got.items():
        assert_exact(tensor, plain[name], oracle[name], name)


@pytest.mark.parametrize("variant", [v for v in CATALOGUE if v.name in SINGLE], ids=str)
def test_captured_gradients_keep_their_bits(variant: Variant) -> None:
    """Whatever the number of threads."""
    call = Call(variant, torch.float32, Sizes(2, 4, 130, 170))
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(call.tiled())
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
    packed = {
        name: torch.cat([leaf[i, :, : rows[where]] for i, rows in enumerate(LENGTHS)], dim=1)
        for name, leaf, where in zip("qkv", call.qkv, (0, 1, 1), strict=True)
    }
    q, k, v = (packed[name].transpose(0, 1) for name in "qkv")
    out, lse, _ = tilewise.attention_varlen(q, k, v, starts_q, starts_k, **call.keywords())
    q, k, v = call.qkv
    parts = [
        plain_attention(
            q[i : i + 1, :, :rows],
            k[i : i + 1, :, :keys],
            v[i : i + 1, :, :keys],
            call.made,
            scale=SCALE,
            sinks=call.leaves.get("sinks"),
            first_batch=i,
        )
        for i, (rows, keys) in enumerate(LENGTHS)
    ]
    expected_out = torch.cat([part[0][0] for part in parts], dim=1).transpose(0, 1)
    expected_lse = torch.cat([part[1][0] for part in parts], dim=1)
    call.grad_out = torch.linspace(-1, 1, expected_out.numel()).double().view(expected_out.shape)
    call.grad_lse = torch.linspace(-1, 1, expected_lse.numel()).double().view(expected_lse.shape)
    assert_all_close(call.results(out, lse), call.results(expected_out, expected_lse))
