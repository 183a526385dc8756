"""The catalogue of variants on every backend and instruction set, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.targets import TARGETS, Target
from tests.plain import attend
from tests.variants_catalogue import (
    CATALOGUE,
    Call,
    Sizes,
    Variant,
    assert_all_close,
    check_exact,
)

# The tiled reference has its own tests in tests/variants/test_catalogue.py.
CPU = [target for target in TARGETS if target.backend == "cpu"] or [TARGETS[-1]]
# Two tiles of queries and two blocks of keys, whole ones in neither.
SPREAD = Sizes(1, 4, 81, 207)

each_variant = pytest.mark.parametrize("variant", CATALOGUE, ids=str)
on_the_best = pytest.mark.parametrize("target", CPU[:1], ids=str, indirect=True)


@pytest.mark.parametrize("target", CPU, ids=str, indirect=True)
@each_variant
def test_a_variant_is_plain_torch(target: Target, variant: Variant) -> None:
    """Output, lse and the gradient of everything, captured tensors too, in float64."""
    call = Call(variant, torch.float64)
    assert_all_close(call.run(target.backend), call.plain())


@on_the_best
@each_variant
def test_over_several_tiles(target: Target, variant: Variant) -> None:
    call = Call(variant, torch.float64, SPREAD)
    assert_all_close(call.run(target.backend), call.plain())


@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("target", CPU, ids=str, indirect=True)
@each_variant
def test_few_queries_without_gradients(target: Target, variant: Variant, queries: int) -> None:
    """They have kernels of their own: keys lie in the lanes, in two blocks and a rest."""
    call = Call(variant, torch.float64, Sizes(2, 4, queries, 342))
    with torch.no_grad():
        out, lse, _ = tilewise.attention(*call.qkv, **call.keywords(target.backend))
        plain = attend(*call.qkv, **call.formula)
    assert_all_close({"out": out, "lse": lse}, {"out": plain.out, "lse": plain.lse})


@on_the_best
@pytest.mark.parametrize("queries", [1, 5])
@each_variant
def test_few_queries_are_exact(target: Target, variant: Variant, queries: int) -> None:
    call = Call(variant, torch.float32, Sizes(1, 4, queries, 342))
    q, k, v = (value.detach().double() for value in call.qkv)
    with torch.no_grad():
        out, lse, _ = tilewise.attention(*call.qkv, **call.keywords(target.backend))
        plain = attend(*call.qkv, **call.formula)
        truth = attend(q, k, v, **call.formula)
    assert_exact(out, plain.out, truth.out, f"{variant}: out")
    assert_exact(lse, plain.lse, truth.lse, f"{variant}: lse")


@on_the_best
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_variant
def test_a_variant_is_exact(target: Target, variant: Variant, dtype: torch.dtype) -> None:
    """The contract, with the captured gradients in it."""
    check_exact(variant, dtype, target.backend)


@on_the_best
@each_variant
def test_a_variant_has_the_same_bits_with_any_number_of_threads(
    target: Target, variant: Variant
) -> None:
    call = Call(variant, torch.float32, SPREAD)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(call.run(target.backend))
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert_same_bits(tensor, other[name], name)


@on_the_best
@each_variant
def test_second_derivatives_are_plain_torch(target: Target, variant: Variant) -> None:
    """By everything that a gradient is defined for, captured tensors too."""
    call = Call(variant, torch.float64, Sizes(1, 4, 7, 9))
    leaves = list(call.leaves.values())
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(leaf.shape, generator=generator).double() for leaf in leaves]

    def second(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(
            [out, lse],
            leaves,
            [call.grad_out, call.grad_lse],
            create_graph=True,
            materialize_grads=True,
        )
        total = torch.stack([(x * y).sum() for x, y in zip(grads, weights, strict=True)]).sum()
        return torch.autograd.grad(total, leaves, materialize_grads=True)

    out, lse, _ = tilewise.attention(*call.qkv, **call.keywords(target.backend))
    plain = attend(*call.qkv, **call.formula)[:2]
    for name, mine, theirs in zip(call.leaves, second(out, lse), second(*plain), strict=True):
        said = f"{name}: {mine} and {theirs}"
        # torch has no second derivative of 0 to a power either.
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8, equal_nan=True, msg=said)
