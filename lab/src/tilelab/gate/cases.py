"""The cases: what the passes launch for the table's rows, in the tiles that ship; loss rows too.

A case here is no attention but launches to compile, of which a row makes one or two. Calls are
never run: problems and operands are on the ``meta`` device, as the engine makes them. They are of
training size, so Triton sees the divisible strides of a real call. Their layout is that of models:
[B, S, H, D] in memory. Importing this module imports no Triton; making a case's launches does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilelab.cases.case import Case as Attention
from tilelab.cases.inputs import build, problem_of
from tilelab.cases.table import rows
from tilelab.gate.record import Case
from tilewise.inspect import gpu
from tilewise.inspect.gpu import FAMILIES, UNPROVEN, Launch, Overrides, Pass, holds, place_of
from tilewise.problem import Grads, Needs, Operands, Problem, output_like
from tilewise.variants.float8 import FLOAT8


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def operands_of(case: Attention) -> tuple[Problem, Operands]:
    """Return the problem, and operands in kernel form."""
    inputs = build(case, device="meta").detached()
    scales = {}
    if case.dtype is FLOAT8:
        heads = {"q_scale": case.heads, "k_scale": case.kv_heads, "v_scale": case.kv_heads}
        scales = {name: meta(case.batch, count) for name, count in heads.items()}
    problem, operands = problem_of(inputs, None, **scales)
    return _in_pages(case, problem, operands) if case.page_size else (problem, operands)


def kind_of(case: Attention) -> str:
    """Return which blocks of the table serve a case: "plain", "+" or "*"."""
    return place_of("forward", operands_of(case)[0]).kind


def backward_tensors(problem: Problem, operands: Operands) -> tuple[Tensor, Needs, Grads]:
    """Return the output's gradient, the wanted gradients (all of them), and memory for them."""
    fixed = any(instr.op == "alibi" for instr in problem.score)  # slopes have no gradient
    learned = tuple(
        tensor.dtype.is_floating_point and not fixed for tensor in operands.score_tensors
    )
    needs = Needs(True, True, True, learned, problem.sinks)
    grads = Grads(
        torch.empty_like(operands.q),
        torch.empty_like(operands.k),
        torch.empty_like(operands.v),
        tuple(
            torch.empty_like(tensor) if wanted else None
            for tensor, wanted in zip(operands.score_tensors, learned, strict=True)
        ),
        None if operands.sinks is None else torch.empty_like(operands.sinks),
    )
    return output_like(operands.q, problem.value_dim), needs, grads


def _in_pages(case: Attention, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return the same call with its keys and values in pages, their rows first in memory."""
    size, slots = case.page_size, case.keys // case.page_size
    pages, dtype = case.batch * slots, case.stored or case.dtype
    k, v = (
        meta(pages, size, case.kv_heads, width, dtype=dtype).transpose(1, 2)
        for width in (case.head_dim, case.value_dim)
    )
    operands = operands._replace(
        k=k,
        v=v,
        cu_seqlens_k=None,
        block_table=meta(case.batch, slots, dtype=torch.int32),
        key_lengths=meta(case.batch, dtype=torch.int32),
    )
    if case.stored is not None:
        scale = meta(pages, case.kv_heads, size)
        operands = operands._replace(k_scale=scale, v_scale=scale)
    return problem._replace(page_size=size, stored=case.stored), operands


def forward(case: Attention, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the launches of the forward pass on a family of chips.

    Few queries are decoded. ``overrides`` are blocks in the place of the family's own.
    """
    problem, operands = operands_of(case)
    result = gpu.empty_result(problem, operands.q, case.statistics)
    return gpu.forward_launches(problem, operands, result, family, overrides)


def backward(case: Attention, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the backward pass's launches, with every gradient; arguments as for ``forward``."""
    problem, operands = operands_of(case)
    result = gpu.empty_result(problem, operands.q, case.statistics)
    grad_out, needs, grads = backward_tensors(problem, operands)
    sent = grad_out, None
    return gpu.backward_launches(problem, operands, result, sent, needs, grads, family, overrides)


def listed(case: Attention, forward: bool, family: str) -> Sequence[Launch]:
    """Return the launches of a pass of a call with key lists; the backward has every gradient."""
    inputs = build(case, device="meta").detached()
    assert inputs.keys is not None
    tensors = inputs.q, inputs.k, inputs.v
    variant = inputs.mask, inputs.score
    return gpu.listed_launches(tensors, *variant, inputs.keys, family, forward=forward)


def unproven(name: Pass, case: Attention, family: str) -> Sequence[Launch]:
    """Return the launches of a pass in a kernel that no GPU has run yet.

    "fused" makes all gradients, "grouped" and "grouped8" (of float8) the output.
    """
    make = backward if name == "fused" else forward
    return make(case, family, [(name, UNPROVEN[name, family, case.head_dim])])


def captured(case: Attention, family: str) -> Sequence[Launch]:
    """Return the launches of ``backward`` that make gradients of what the score captured."""
    launches = backward(case, family)
    names = [launch.kernel.__name__ for launch in launches]
    return launches[names.index("query_kernel") + 1 :]


# Kernels that multiply no matrices: they read rows once, or sums that others made.
_PLAIN = frozenset(
    {
        "row_kernel",
        "sink_kernel",
        "fold_kernel",
        "fold_table_kernel",
        "merge_splits",
        "spread_lines_kernel",
        "factor_kernel",
        "cross_entropy_kernel",
        "number_kernel",
        "narrow_kernel",
    }
)
# Of a wgmma beside a score: this takes longer than what a narrow product leaves idle, and wider
# ones spill in the loops of dK and dV.
_SCORED_COLUMNS = 32
_TRANSPOSING = frozenset({"transpose_kernel"})
_UNPROVEN = (
    "D64 full",
    "D64 causal",
    "D128 full",
    "D128 causal",
    "D128 causal fp16",
    "D256 full",
    "D256 causal",
)

_UNPROVEN_EIGHT = ("D64 full fp8", "D64 causal fp8", "D128 full fp8", "D128 causal fp8")


def cases() -> list[Case]:
    """Return the compiled passes of every row: forward, and backward where it has one."""
    attention = [case for each in rows("gate") for case in _cases_of(each)]
    return attention + vocabulary_cases()


def _cases_of(each: Attention) -> Iterator[Case]:
    where = _families(each)

    def case(words: str, launches: partial[Sequence[Launch]], **more: Any) -> Case:
        fields = {"without_products": _PLAIN, "families": where, "key": each.quick, **more}
        return Case(f"{words} {each.name}", launches, each.dtype.itemsize <= 2, **fields)

    if each.kind == "captured":
        yield case("forward captured", partial(forward, each))
        yield case("captured", partial(captured, each))
    elif each.kind == "lists":
        here = _without_spills(where, each.head_dim, {"gfx1100": 256})
        yield case("lists forward", partial(listed, each, True), families=here)
        yield case("lists", partial(listed, each, False))
    elif each.kind == "decode":
        here = _without_spills(where, each.head_dim, {"gfx1100": 512, "gfx1201": 512})
        yield case("decode", partial(forward, each), families=here)
    else:
        columns = _SCORED_COLUMNS if each.score else 64
        bare = _TRANSPOSING if each.dtype is FLOAT8 else frozenset[str]()
        yield case("forward", partial(forward, each), without_products=bare, columns=columns)
        yield from _unproven("grouped", each)
        yield from _unproven("grouped8", each)
        if each.passes == "both":
            yield case("backward", partial(backward, each), columns=columns)
            yield from _unproven("fused", each)


def _unproven(name: Pass, each: Attention) -> Iterator[Case]:
    """Yield the case of a row in a kernel of ``UNPROVEN``, where that has the row's width."""
    own = tuple(
        family for kernel, family, width in UNPROVEN if kernel == name and width == each.head_dim
    )
    if own and each.name in (_UNPROVEN_EIGHT if name == "grouped8" else _UNPROVEN):
        bare, launches = _PLAIN | _TRANSPOSING, partial(unproven, name, each)
        yield Case(f"{name} {each.name}", launches, True, bare, each.quick, own, measured=False)


def vocabulary_cases() -> list[Case]:
    """Return the rows of ``linear_cross_entropy``: a block of all words, and a block of words."""
    found = []
    for dtype, options in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)):
        kind = f"{str(dtype).removeprefix('torch.')}{' with options' if options else ''}"
        for first, name in ((None, "loss"), (4096, "words")):
            launches = partial(vocabulary, dtype, first, options)
            key = dtype is torch.bfloat16
            found.append(Case(f"{name} {kind}", launches, True, _PLAIN, key))
    return found


def vocabulary(
    dtype: torch.dtype, first: int | None, options: bool, family: str
) -> Sequence[Launch]:
    """Return the launch over 2,048 rows of 128k words, or over a block of words from ``first``."""
    words = 2**17 if first is None else 4096
    logits, targets = meta(2048, words, dtype=dtype), meta(2048, dtype=torch.int64)
    return gpu.cross_entropy_launches(logits, targets, meta(2048), first=first, options=options)


def _without_spills(where: Sequence[str], width: int, widest: Mapping[str, int]) -> tuple[str, ...]:
    """Return the families but those that spill in loops at this width, whatever the blocks.

    On gfx1100 these are lists of 512 in the forward pass (18 to 53 times), and there and on gfx1201
    decoding over latents of 576 (11 to 59 times). Neither chip has been measured.
    """
    return tuple(x for x in where if width <= widest.get(x, width))


def _families(each: Attention) -> tuple[str, ...]:
    """Return the families that the backend does not decline such widths on."""
    widths = each.head_dim, each.value_dim
    return tuple(name for name in FAMILIES if holds(name, each.dtype, *widths))


CASES = cases()
