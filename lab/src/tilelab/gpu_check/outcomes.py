"""What comes of a case: by the public call, by plain torch, and in float64; pages and float8."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import tilewise
from tilelab.cases.case import Case
from tilelab.cases.dense import dense
from tilelab.cases.inputs import Inputs, call, gradients, problem_of, send
from tilelab.cases.table import find
from tilelab.gpu_check.setting import Setting
from tilewise.inspect.calls import lowered
from tilewise.problem import Result
from tilewise.variants.float8 import FLOAT8, Scales
from tilewise.variants.values import Mask

Outcome = dict[str, Tensor]  # "out", "lse", and "grad of NAME" for each leaf


def sized(setting: Setting, case: Case) -> Case:
    """Return the problem as large as the setting says."""
    shrink, narrow = setting.sizes.shrink, math.isqrt(setting.sizes.shrink)
    sequences = case.sequences
    if sequences is not None:
        sequences = tuple((-(-m // shrink), -(-n // shrink)) for m, n in sequences)
    return replace(
        case,
        queries=-(-case.queries // shrink),
        keys=setting.sizes.decode_keys + 1 if case.keys < 0 else -(-case.keys // shrink),
        head_dim=-(-case.head_dim // narrow),
        value_dim=-(-case.value_dim // narrow),
        sequences=sequences,
    )


def attend(setting: Setting, inputs: Inputs, *, backward: bool) -> Outcome:
    """Return the result of the public call: out and lse, or the gradients."""
    out, lse, _ = call(inputs, setting.backend, return_lse=True)
    return _gradients(inputs, inputs, out, lse) if backward else _forward(out, lse)


def _forward(out: Tensor, lse: Tensor) -> Outcome:
    return {"out": out.detach(), "lse": lse.detach()}


def _gradients(inputs: Inputs, leaves: Inputs, out: Tensor, lse: Tensor) -> Outcome:
    """Return the gradients of some leaves; the same ones are sent in for the same inputs."""
    found = gradients(leaves, (out, lse), send(inputs))
    return {f"grad of {name}": grad for name, grad in found.items()}


def refer(inputs: Inputs, dtype: torch.dtype) -> Outcome:
    """Return the plain mathematics with every matrix in ``dtype``; in float64 it is the oracle."""
    leaves = inputs.convert(Tensor.double) if dtype == torch.float64 else inputs
    with inputs.q.device:  # the reference makes what it needs on the default device
        out, lse = dense(*problem_of(leaves), dtype=dtype)[:2]
        return _forward(out, lse) | _gradients(inputs, leaves, out, lse)


PAGE_SIZES = (16, 48, 128)  # parts of a kernel's block of keys, no divisor of it, and all of it
_FEW = 3


def few_queries() -> Case:
    """Return the sequences of "varlen" with as many queries each, and so few that they decode."""
    case = find("accuracy", "varlen")
    sequences = tuple((_FEW, keys) for _, keys in case.sequences or ())
    return replace(case, name="few rows", sequences=sequences)


def attend_pages(
    setting: Setting, inputs: Inputs, page_size: int, *, packed: bool, seed: int
) -> Outcome:
    """Return the packed result of the public call: out and lse.

    Args:
        setting: whose backend does it.
        inputs: of a variable-length problem.
        page_size: rows of a page.
        packed: whether queries are; else each sequence has as many.
        seed: of the order of the pages, and how many more there are than it takes.
    """
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    table = block_table(cu_k, page_size, seed)
    k, v = (in_pages(each.detach(), cu_k, table, page_size) for each in (inputs.k, inputs.v))
    q = inputs.q.detach()
    if not packed:
        q = q.reshape(table.shape[0], -1, *q.shape[1:]).transpose(1, 2)
    with torch.no_grad():
        out, lse, _ = tilewise.attention_paged(
            q,
            k,
            v,
            table,
            cu_k.diff(),
            cu_q if packed else None,
            mask=inputs.mask,
            return_lse=True,
            backend=setting.backend,
        )
    if not packed:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return {"out": out, "lse": lse}


def block_table(cu_seqlens: Tensor, page_size: int, seed: int) -> Tensor:
    """Every sequence's pages, any order; -1 where it has none. There are ``seed`` pages more."""
    counts = [-(-length // page_size) for length in cu_seqlens.diff().tolist()]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(counts) + seed, generator=generator).tolist()
    table = torch.full((len(counts), max(counts) + seed), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for slot in range(count):
            table[b, slot] = order.pop()
    return table.to(cu_seqlens.device)


def in_pages(rows: Tensor, cu_seqlens: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Pages [pages, Hk, page_size, width] of packed rows [Tk, Hk, width], as caches hold them."""
    held = int(table.max()) + 1
    pool = rows.new_full((held, page_size, *rows.shape[1:]), math.nan)
    starts = cu_seqlens.tolist()
    for b, own in enumerate(table.tolist()):
        for slot, first in enumerate(range(starts[b], starts[b + 1], page_size)):
            piece = rows[first : min(first + page_size, starts[b + 1])]
            pool[own[slot], : piece.shape[0]] = piece
    return pool.transpose(1, 2)


def quantised(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, S, D] as float8, and scales [H] by which the largest number of each head is 448."""
    largest = numbers.detach().float().abs().amax((0, 2, 3)).clamp(min=1e-12)
    scale = largest / torch.finfo(FLOAT8).max
    return (numbers.detach().float() / scale[:, None, None]).to(FLOAT8), scale


def references(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales, mask: Mask | None = None
) -> tuple[Result, Result]:
    """Return the results of the plain implementation in float8 and of float64."""
    of_q, of_k, of_v = scales
    problem, operands = lowered(q, k, v, mask=mask, q_scale=of_q, k_scale=of_k, v_scale=of_v)
    return dense(problem, operands, dtype=FLOAT8), dense(problem, operands)
