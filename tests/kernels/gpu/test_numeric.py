"""The numeric suite's tables on the GPU backend, in the interpreter: a sample, and all of it slow.

float32 takes every case that is small enough, bfloat16 and float16 one in three, each starting at
another one. The contract is the suite's own (``tests/contract.py``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings

from tests.cases import TABLE, Case, cases
from tests.kernels.gpu.guard import Watch
from tests.kernels.targets import Target
from tests.oracle import assert_same, attend, check_case, check_drawn, refer_cached
from tests.variants_catalogue import CATALOGUE, Variant, check_exact

GPU = Target("gpu", "", 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY = 3
MOST_PAIRS = 170_000  # of a case: 2 x 2 heads of 200 x 200
WIDEST = 256

pytestmark = pytest.mark.slow


def _pairs(case: Case) -> int:
    if case.sequences is not None:
        return case.heads * sum(queries * keys for queries, keys in case.sequences)
    return case.batch * case.heads * case.queries * case.keys


SMALL = [
    case
    for case in TABLE
    if _pairs(case) <= MOST_PAIRS and max(case.head_dim, case.value_dim) <= WIDEST
]


def _sampled(table: Any) -> list[Any]:
    """Parameters (row of a table, dtype)."""
    return [
        pytest.param(row, dtype, id=f"{GPU}-{row.name}-{str(dtype).removeprefix('torch.')}")
        for offset, dtype in enumerate(DTYPES)
        for index, row in enumerate(table)
        if dtype == torch.float32 or (index + offset) % EVERY == 0
    ]


@pytest.mark.parametrize(("case", "dtype"), _sampled(SMALL))
def test_a_case_is_exact(case: Case, dtype: torch.dtype) -> None:
    check_case(case.of(dtype), GPU.backend)


@given(case=cases())
@settings(max_examples=30)
def test_a_drawn_case_is_exact(case: Case) -> None:
    assume(_pairs(case) <= MOST_PAIRS // 4)
    check_drawn(case.of(torch.float32) if case.dtype == torch.float64 else case, GPU.backend, 16)


@pytest.mark.parametrize(
    "name", ["no-keys-sinks", "grouped", "dropout-all", "bias-rows", "prefix-each", "varlen-all"]
)
def test_any_order_of_programs_gives_the_same_bits(watched: Watch, name: str) -> None:
    case = next(case for case in TABLE if case.name == name)
    inputs, reference = refer_cached(case)
    outcomes = []
    for seed in (None, 1, 2):
        watched.reseed(seed)
        outcomes.append(attend(inputs, GPU.backend, reference.sent))
    for other in outcomes[1:]:
        assert_same(other, outcomes[0])


@pytest.mark.parametrize(("variant", "dtype"), _sampled(CATALOGUE))
def test_a_variant_is_exact(variant: Variant, dtype: torch.dtype) -> None:
    """With the gradients of what it captures."""
    check_exact(variant, dtype, GPU.backend)
