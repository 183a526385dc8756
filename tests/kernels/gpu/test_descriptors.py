"""Whole blocks by tensor descriptors, interpreted: the same bits as by pointers, and no leak."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Case, build
from tests.contract import assert_same_bits
from tests.kernels.gpu import passes
from tests.kernels.gpu.passes import GQA, prepare_forward
from tests.oracle import problem_of
from tilewise.kernels.gpu.config import (
    FAMILIES,
    Blocks,
    Config,
    Descriptors,
    by_pointers,
    config_for,
)
from tilewise.kernels.gpu.expressions.variant import variant_of
from tilewise.kernels.gpu.launch import Launch, run
from tilewise.kernels.gpu.walk.descriptors import described, key_rows
from tilewise.problem import Operands, Problem, Result
from tilewise.variants.program import decode

BLOCKS = Blocks(16, 16, 4, 1)
SMALL = {**passes.SMALL, "batch": 2, "keys": 61}
HALF = torch.float16


def _launches(
    problem: Problem, operands: Operands, descriptors: Descriptors | None, blocks: Blocks = BLOCKS
) -> tuple[Result, Launch, list[Launch]]:
    """A result that is still empty, and its launches: the output's, and the statistics'."""
    config = Config("interpreter", overrides=(("forward", blocks),), descriptors=descriptors)
    result, (launch, *rest) = prepare_forward(problem, operands, config, "top1")
    return result, launch, rest


def _both(
    problem: Problem, operands: Operands, blocks: Blocks = BLOCKS
) -> tuple[Result, Result, Launch]:
    """Results with descriptors and without, and the launch with them."""
    ours, launch, rest = _launches(problem, operands, Descriptors(1, 1), blocks)
    theirs, plain, others = _launches(problem, operands, None, blocks)
    run([launch, *rest, plain, *others])
    return ours, theirs, launch


def _assert_same(ours: Result, theirs: Result) -> None:
    for name, one, other in zip(Result._fields, ours, theirs, strict=True):
        assert one is not None
        assert other is not None
        assert_same_bits(one, other, name)


CASES = [
    Case("plain", **SMALL),
    Case("one-row", **SMALL | {"queries": 1}),
    Case("one-block", **SMALL | {"keys": 16}),
    Case("one-key", **SMALL | {"keys": 1}),
    Case("one-head", **SMALL | {"heads": 1, "kv_heads": 1, "batch": 1}),
    Case("no-rows", **SMALL | {"queries": 0}),
    Case("widths", **SMALL | {"head_dim": 24, "value_dim": 104}, mask=("causal",)),
    Case("transposed", **SMALL, **GQA, mask=("causal",), layout="bshd"),
    Case("window", **SMALL, mask=("window",)),
    Case("lengths", **SMALL, mask=("lengths",), sinks=True),
    Case("scored", **SMALL, **GQA, mask=("causal",), score=("alibi", "softcap_tight")),
    Case(
        "packed",
        **GQA,
        head_dim=16,
        value_dim=32,
        mask=("causal",),
        sequences=((33, 20), (0, 5), (1, 40), (17, 0), (16, 16), (32, 48)),
    ),
    Case("packed-one", head_dim=16, value_dim=16, sequences=((20, 50),), layout="bshd"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_bits(case: Case) -> None:
    """Of everything that a forward pass gives, in every layout."""
    problem, operands = problem_of(build(case.of(HALF)).detached())
    ours, theirs, launch = _both(problem, operands)
    assert "k_rows" in launch.arguments
    _assert_same(ours, theirs)


@pytest.mark.parametrize("size", [16, 32])
def test_pages(size: int) -> None:
    """A page of whole blocks is found by its number; one that cuts blocks has no descriptor."""
    table = torch.tensor([[3, 0, 5, 1], [4, 2, -1, -7]], dtype=torch.int32)
    lengths = torch.tensor([4 * size - 3, size + 5], dtype=torch.int32)
    generator = torch.Generator().manual_seed(size)
    q = torch.randn(2, 4, 21, 16, generator=generator).half()
    k, v = (torch.randn(6, size, 2, 16, generator=generator).half() for _ in range(2))
    k[2, 5:] = v[2, 5:] = math.nan
    k[1, -3:] = v[1, -3:] = math.nan
    sizes = (2, 4, 2, 21, 4 * size, 16, 16)
    problem = Problem(*sizes, HALF, "cpu", "dense", (), (), 0.25, 0.0, False, size)
    pages = (k.transpose(1, 2), v.transpose(1, 2))
    operands = Operands(q, *pages, block_table=table, key_lengths=lengths)
    ours, theirs, launch = _both(problem, operands)
    assert "k_rows" in launch.arguments
    assert not bool(ours.out.isnan().any())
    _assert_same(ours, theirs)
    wide = BLOCKS._replace(keys=64)
    assert "k_rows" not in _launches(problem, operands, Descriptors(1), wide)[1].arguments


def test_nothing_leaks() -> None:
    """NaN beyond lengths, in the rows of partial blocks and behind the last sequence."""
    inputs = build(Case("leak", **SMALL, mask=("lengths",), dtype=HALF)).detached()
    problem, operands = problem_of(inputs)
    (lengths,) = operands.mask_tensors
    k, v = (tensor.clone() for tensor in (operands.k, operands.v))
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = v[b, :, length:] = math.nan
    ours, launch, rest = _launches(problem, operands._replace(k=k, v=v), Descriptors(1))
    expected, plain, others = _launches(problem, operands, None)
    run([launch, *rest, plain, *others])
    assert "k_rows" in launch.arguments
    _assert_same(ours, expected)


def test_every_whole_block_goes_by_a_descriptor() -> None:
    """Moved to other memory, keys are still read from where the descriptor points."""
    case = Case("moved", **SMALL | {"keys": 64, "queries": 32}, dtype=HALF)
    problem, operands = problem_of(build(case).detached())
    ours, launch, rest = _launches(problem, operands, Descriptors(1))
    poisoned = {name: torch.full_like(getattr(operands, name), math.nan) for name in "kv"}
    run([launch._replace(arguments=launch.arguments | poisoned), *rest])
    expected, plain, others = _launches(problem, operands, None)
    run([plain, *others])
    _assert_same(ours, expected)


def _tensor(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


DENSE = Problem(2, 2, 2, 8, 64, 32, 32, HALF, "cpu", "dense", (), (), 1.0, 0.0, False)
GOOD = {
    "contiguous": _tensor(2, 2, 64, 32),
    "transposed": _tensor(2, 64, 2, 32).transpose(1, 2),
    "sliced": _tensor(2, 2, 64, 40)[..., 8:],
    "one-batch": _tensor(1, 2, 64, 32).as_strided((1, 2, 64, 32), (7, 2048, 32, 1)),
    "narrow": _tensor(2, 2, 64, 8),
}
BAD = {
    "base": _tensor(2, 2, 64, 40)[..., 4:36],
    "step": _tensor(2, 2, 64, 36)[..., :32],
    "columns": _tensor(2, 2, 32, 64).mT,
    "expanded": _tensor(1, 2, 64, 32).expand(2, 2, 64, 32),
    "too-narrow": _tensor(2, 2, 64, 7),
    "empty": _tensor(2, 2, 0, 32),
}


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_which_tensors_have_one(name: str) -> None:
    """The address and the strides decide, for each tensor by itself."""
    tensor = GOOD.get(name, BAD.get(name))
    assert tensor is not None
    found = described(tensor, DENSE, 16)
    assert (found is not None) == (name in GOOD)
    if found is not None:
        assert found.base is tensor
        assert found.shape == list(tensor.shape)
        assert found.strides[2:] == list(tensor.stride()[2:])
        assert found.block_shape[:3] == [1, 1, 16]


def test_packed_rows_have_one() -> None:
    """Dimensions (1, h, row, column), whatever lies first in memory."""
    packed = DENSE._replace(layout="varlen")
    found = described(_tensor(64, 3, 32), packed, 16)
    assert found is not None
    assert found.shape == [1, 3, 64, 32]
    assert found.strides[1:] == [32, 96, 1]
    assert described(_tensor(64, 3, 32), packed, 512) is None  # more rows than a copy may have


@pytest.mark.parametrize(
    "change",
    [
        {"keys": 2047},
        {"dtype": torch.float32},
        {"head_dim": 130},
        {"dropout_p": 0.5},
        {"score": decode("softcap(2.0) bias()[0]")},
        {"page_size": 96},
    ],
    ids=str,
)
def test_when_they_do_not_pay(change: dict[str, Any]) -> None:
    """Few keys, float32, wide heads, dropout, a bias, pages that cut blocks, other chips."""
    problem = DENSE._replace(keys=2048)
    k = _tensor(1, 2, 2048, 32).expand(1, 2, 2048, 32)
    operands = Operands(k, k, k)
    config, blocks = config_for("sm_90"), Blocks(128, 128, 8, 2)
    variant = variant_of(problem, (), ())
    assert key_rows(problem, operands, config, variant, blocks).k is not None
    assert key_rows(problem._replace(**change), operands, config, variant, blocks).k is None
    for family in ("sm_80", "sm_120", "gfx942", "interpreter"):
        assert key_rows(problem, operands, config_for(family), variant, blocks).arguments() == {
            "k_rows": None,
            "v_rows": None,
        }


def test_one_tensor_without_is_both_without() -> None:
    """Where one of the two has none both keep their pointers: so the gate has seen it."""
    good, bad = GOOD["contiguous"], BAD["step"]
    config = Config("interpreter", descriptors=Descriptors(1))
    for k, v in ((good, bad), (bad, good)):
        found = key_rows(DENSE, Operands(k, k, v), config, variant_of(DENSE, (), ()), BLOCKS)
        assert found.arguments() == {"k_rows": None, "v_rows": None}


def test_they_can_be_turned_off() -> None:
    """For measuring what they gain, and only meanwhile."""
    assert config_for("sm_90").descriptors is not None
    with by_pointers():
        assert config_for("sm_90") == config_for("sm_90")._replace(descriptors=None)
    assert config_for("sm_90").descriptors is not None


def test_families_that_have_them() -> None:
    """Those of which the gate showed no more registers and no longer loop."""
    assert {name for name, family in FAMILIES.items() if family.descriptors} == {"sm_90", "sm_100"}
