"""The device of the check, the size of its problems, and what comes of them.

A case is done by the public call, by plain torch, and in float64; also in pages and in float8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilelab.cases.case import Case
from tilelab.cases.dense import dense
from tilelab.cases.inputs import Inputs, call, gradients, problem_of, send
from tilelab.cases.table import find
from tilelab.common import clock, worker
from tilelab.peers.work import Work, work_of
from tilewise.inspect.calls import lowered
from tilewise.problem import Result
from tilewise.variants.float8 import FLOAT8, Scales
from tilewise.variants.values import Mask


class Model(NamedTuple):
    """A model of the training step."""

    layers: int  # these four: of the transformer
    heads: int
    width: int
    vocabulary: int
    context: int  # positions of a sequence
    batch: int  # sequences of a step
    causal: bool  # a decoder as GPT-2 is, and not an encoder as BERT is


class Sizes(NamedTuple):
    """Sizes of the problems."""

    # Of every speed case: batch = tokens / length, heads = hidden / width.
    tokens: int = 16384
    hidden: int = 2048
    # These two: of the speed cases, the longest first; the two greatest lengths have goals.
    lengths: tuple[int, ...] = (16384, 8192, 4096, 2048, 1024, 512)
    widths: tuple[int, ...] = (128, 64, 256)
    decode_batch: int = 16  # these two: of decoding, with 32 query heads on 8
    decode_keys: int = 32768
    # What lengths of the accuracy cases are divided by; their widths by the root of it.
    shrink: int = 1
    long: int = 16384  # these two: the long accuracy cases
    long_width: int = 128
    huge: int = 8200  # batch items of the case whose operands pass 2^31 elements
    memory: tuple[int, ...] = (4096, 8192, 16384, 32768)  # lengths at which memory is measured
    matrix: int = 8192  # these two: of the ceilings
    copy_bytes: int = 2**32
    models: tuple[tuple[str, Model], ...] = (
        ("GPT-2 small", Model(12, 12, 768, 50304, 1024, 16, True)),
        ("BERT-large", Model(24, 16, 1024, 30592, 512, 32, False)),
        ("GPT-2 medium", Model(24, 16, 1024, 50304, 1024, 8, True)),
    )
    steps: int = 10  # training steps that are timed


_ROUNDS = (5, 25)  # of timed calls, whatever the budget
REAL = Sizes()
TINY = Sizes(
    tokens=64,
    hidden=32,
    lengths=(64, 48, 32),
    widths=(16,),
    decode_batch=1,
    decode_keys=96,
    shrink=16,
    long=80,
    long_width=16,
    huge=2,
    memory=(32, 64),
    matrix=32,
    copy_bytes=2**16,
    models=(
        ("GPT-2 small", Model(1, 2, 32, 64, 32, 1, True)),
        ("BERT-large", Model(1, 2, 32, 64, 32, 1, False)),
        ("GPT-2 medium", Model(1, 2, 32, 64, 24, 1, True)),
    ),
    steps=1,
)


@dataclass(frozen=True)
class Setting:
    """The setting of a job."""

    backend: str = "gpu"  # of ``tilewise.attention``; it never falls back
    self_test: bool = False  # on the CPU in Triton's interpreter, tiny, with no claim about time
    scratch: str = ""  # a folder in which jobs leave word for later ones; "" for none

    @property
    def device(self) -> torch.device:
        """The device of the tensors; a GPU with its index, as tensors on it say."""
        return torch.device("cpu") if self.self_test else torch.device("cuda", 0)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the problems."""
        return TINY if self.self_test else REAL

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of timed calls.

        The self-test has no bfloat16: Triton's interpreter multiplies its bits as if they were
        whole numbers.
        """
        return torch.float16 if self.self_test else torch.bfloat16

    def work(self, case: Case, **more: Any) -> Work:
        """Return a case to measure here, in the dtype of timed calls."""
        more = {"backend": self.backend, "dtype": self.dtype, **more}
        return work_of(case, device=self.device.type, **more)

    def square(self, name: str, length: int, heads: int, width: int, **more: Any) -> Work:
        """Return a work of one batch item and as many keys as queries."""
        return self.work(Case(name, 1, heads, heads, length, length, width, width), **more)

    def environment(self, parallel: bool = False) -> dict[str, str]:
        """Return a worker's environment: in self-tests with Triton's interpreter."""
        found = worker.environment()
        if self.self_test:
            found["TRITON_INTERPRET"] = "1"
        elif parallel:
            # One compiler each: the processes are as many as the cores already.
            found |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return found

    @property
    def timer(self) -> str:
        """What times its calls: events of a GPU, or in the self-test the processor."""
        return "cpu" if self.self_test else "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if not self.self_test:
            torch.cuda.synchronize()

    def race(self, calls: Mapping[str, clock.Call], budget_s: float) -> dict[str, list[float]]:
        """Time warm calls in turn, as ``clock.race`` does; in the self-test once each."""
        if self.self_test:
            return {name: [clock.seconds_of(call)] for name, call in calls.items()}
        return clock.race(calls, budget_s, _ROUNDS, self.timer)


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

    The inputs are of a variable-length problem; where queries are not ``packed``, each sequence has
    as many. ``seed`` draws the order of the pages, and how many more there are than it takes.
    """
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    table = block_table(cu_k, page_size, seed)
    k, v = (in_pages(each.detach(), cu_k, table, page_size) for each in (inputs.k, inputs.v))
    q = inputs.q.detach()
    if not packed:
        q = q.reshape(table.shape[0], -1, *q.shape[1:]).transpose(1, 2)
    starts = cu_q if packed else None
    more: dict[str, Any] = {"mask": inputs.mask, "return_lse": True, "backend": setting.backend}
    with torch.no_grad():
        out, lse, _ = tilewise.attention_paged(q, k, v, table, cu_k.diff(), starts, **more)
    if not packed:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return {"out": out, "lse": lse}


def block_table(cu_seqlens: Tensor, page_size: int, seed: int) -> Tensor:
    """Every sequence's pages, any order; -1 where it has none. There are ``seed`` pages more."""
    counts = [-(-length // page_size) for length in cu_seqlens.diff().tolist()]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(counts) + seed, generator=generator).int().flip(0)
    table = torch.full((len(counts), max(counts) + seed), -1, dtype=torch.int32)
    for row, own in zip(table, order.split_with_sizes([*counts, seed]), strict=False):
        row[: len(own)] = own
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
