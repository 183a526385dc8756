"""The passes of the GPU kernels in small blocks, in the interpreter, and checks that they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tilewise
from tests.cases import Case
from tests.contract import assert_exact, assert_same_bits
from tests.oracle import Sent, problem_of, refer_cached
from tilewise.kernels.gpu import Launch, run
from tilewise.kernels.gpu.backend import empty_result
from tilewise.kernels.gpu.backward import Upstream, backward_of
from tilewise.kernels.gpu.backward.passes import backward_launches
from tilewise.kernels.gpu.config import Blocks, Config, Parts
from tilewise.kernels.gpu.expressions import Variant, variant_of
from tilewise.kernels.gpu.forward import Forward as ForwardPass
from tilewise.kernels.gpu.forward.attend import forward_launches
from tilewise.kernels.gpu.forward.decode import decode_launches
from tilewise.problem import Grads, Needs, Operands, Problem, Result, Statistics
from tilewise.reference import tiled

NAN = math.nan
HALVES = (torch.float16, torch.bfloat16)
GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2}
SMALL: dict[str, Any] = {"batch": 1, "queries": 37, "keys": 45, "head_dim": 16, "value_dim": 16}
BLOCKS = (Blocks(16, 16, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1))

# A forward pass of a problem, with the statistics that are asked for.
Forward = Callable[[Problem, Operands, Statistics], Result]


def variant(problem: Problem, operands: Operands) -> Variant:
    """The functions of the problem's mask and score."""
    ranks = [tuple(x.dim() for x in tensors) for tensors in operands[3:5]]
    return variant_of(problem, *ranks)


def prepare_forward(
    problem: Problem, operands: Operands, config: Config, statistics: Statistics = ""
) -> tuple[Result, list[Launch]]:
    """A result that is still empty, and the launches that fill it."""
    result = empty_result(problem, operands.q, statistics)
    own = variant(problem, operands)
    todo = forward_launches(ForwardPass(problem, operands, result, config, own))
    return result, todo


def forward(
    problem: Problem,
    operands: Operands,
    blocks: Blocks,
    statistics: Statistics = "",
    parts: Parts | None = None,
) -> Result:
    """The forward pass in small blocks."""
    config = Config("interpreter", overrides=(("forward", blocks),), parts=parts)
    result, todo = prepare_forward(problem, operands, config, statistics)
    run(todo)
    return result


def decode(
    problem: Problem, operands: Operands, statistics: Statistics = "", keys: int = 16
) -> Result:
    """The forward pass of few queries, in blocks of so many keys."""
    config = Config("interpreter", overrides=(("decode", Blocks(16, keys, 4, 1)),))
    result = empty_result(problem, operands.q, statistics)
    own = variant(problem, operands)
    run(decode_launches(ForwardPass(problem, operands, result, config, own)))
    return result


def all_needs(operands: Operands) -> Needs:
    """Every gradient there is."""
    floats = tuple(tensor.is_floating_point() for tensor in operands.score_tensors)
    return Needs(True, True, True, floats, operands.sinks is not None)


def prepare_backward(
    problem: Problem,
    operands: Operands,
    result: Result,
    sent: Sent,
    blocks: Blocks,
    needs: Needs | None = None,
    parts: Parts | None = None,
) -> tuple[Grads, list[Launch]]:
    """Gradients that hold NaN still, and the launches that fill them, in small blocks."""
    needs = all_needs(operands) if needs is None else needs

    def room(tensor: Tensor | None, need: bool) -> Tensor | None:
        return torch.full_like(tensor, NAN) if need and tensor is not None else None

    q, k, v = (room(tensor, need) for tensor, need in zip(operands[:3], needs[:3], strict=True))
    captured = tuple(
        torch.full(tensor.shape, NAN, dtype=tensor.dtype) if need else None
        for tensor, need in zip(operands.score_tensors, needs.score_tensors, strict=True)
    )
    grads = Grads(q, k, v, captured, room(operands.sinks, needs.sinks))
    config = Config("interpreter", overrides=(("dq", blocks), ("dkdv", blocks)), parts=parts)
    upstream = Upstream(sent.out, sent.lse, sent.entropy)
    own = variant(problem, operands)
    call = backward_of(problem, operands, result, upstream, needs, config, own)
    launches = backward_launches(call, grads)
    # What host code did besides launches would not be done when a call is replayed.
    written = (*grads[:3], *captured, grads.sinks)
    assert all(x is None or x.is_meta or bool(x.isnan().all()) for x in written)
    return grads, launches


def backward(
    problem: Problem,
    operands: Operands,
    sent: Sent,
    blocks: Blocks,
    needs: Needs | None = None,
    statistics: Statistics = "",
    parts: Parts | None = None,
) -> Grads:
    """Both passes in small blocks."""
    result = forward(problem, operands, blocks, statistics, parts)
    grads, todo = prepare_backward(problem, operands, result, sent, blocks, needs, parts)
    run(todo)
    return grads


def on_meta(value: Any) -> Any:
    """A tensor, or a tuple of what there is, without values."""
    if isinstance(value, tuple):
        found = [on_meta(each) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    return value.to("meta") if isinstance(value, Tensor) else value


def check_case(case: Case, forward: Forward) -> None:
    """Assert the contract for out and lse of a pass."""
    inputs, reference = refer_cached(case)
    got = forward(*problem_of(inputs.detached()), "")
    assert_exact(got.out, reference.plain.out, reference.oracle.out, f"{case}: out")
    assert_exact(got.lse, reference.plain.lse, reference.oracle.lse, f"{case}: lse")


def check_statistics(problem: Problem, operands: Operands, forward: Forward) -> None:
    """They are the reference's, the first of several top keys too, and change no bit of out."""
    got = forward(problem, operands, "top1")
    expected = tiled.forward(problem, operands, "top1")
    for name in ("max_logit", "entropy", "lse"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), msg=name)
    torch.testing.assert_close(got.stats, expected.stats, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.top_key, expected.top_key)
    bare = forward(problem, operands, "")
    assert_same_bits(got.out, bare.out, "out")
    assert_same_bits(got.lse, bare.lse, "lse")
    assert_same_bits(got.stats[:2], bare.stats, "stats")


def check_hidden(
    mask: Any, qkv: Any, where: Any, rows: slice = slice(None), holes: tuple[str, ...] = ("k", "v")
) -> None:
    """Assert that NaN in keys or values that a mask hides changes no bit of the rows.

    Args:
        mask: of the public call.
        qkv: the operands.
        where: the place of the NaN.
        rows: those that see nothing of it.
        holes: which of k and v hold NaN, one call for each entry.
    """
    given = dict(zip("qkv", qkv, strict=True))

    def call(poisoned: str) -> Any:
        tensors = {name: given[name].clone() for name in "qkv"}
        for name in poisoned:
            if tensors[name].dtype.itemsize == 1:  # either NaN of e4m3
                tensors[name].view(torch.uint8)[where] = 0x7F if name == "k" else 0xFF
            else:
                tensors[name][where] = NAN
        return tilewise.attention(**tensors, mask=mask, backend="gpu", return_lse=True)

    good = call("")
    for poisoned in holes:
        got = call(poisoned)
        assert_same_bits(got.out[:, :, rows], good.out[:, :, rows], f"out, NaN in {poisoned}")
        assert_same_bits(got.lse[:, :, rows], good.lse[:, :, rows], f"lse, NaN in {poisoned}")
