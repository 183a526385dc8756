"""The forward kernel in Triton's interpreter: exactness, leaks, bits, and its host side.

``test_backward.py`` holds the outputs of all cases in float32 to the 2x rule, with the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from tests.cases import Case, build
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.gpu.passes import (
    BLOCKS,
    GQA,
    HALVES,
    NAN,
    SMALL,
    Forward,
    check_case,
    check_hidden,
    check_statistics,
    forward,
    on_meta,
    prepare_forward,
)
from tests.oracle import attend, problem_of, refer_cached
from tilewise import masks, scores
from tilewise.errors import Unsupported
from tilewise.kernels.gpu import run
from tilewise.kernels.gpu.config import FAMILIES, Blocks, Config, Parts, config_for
from tilewise.reference import tiled

CASES = [
    Case("plain", **SMALL),
    Case("one-row", **{**SMALL, "queries": 1}),
    Case("one-key", **{**SMALL, "keys": 1}),
    Case("no-rows", **{**SMALL, "queries": 0}),
    Case("no-keys", **{**SMALL, "keys": 0}, sinks=True),
    Case("narrow", **{**SMALL, "head_dim": 3, "value_dim": 33}, **GQA, mask=("causal",)),
    Case("wide", **{**SMALL, "head_dim": 130, "value_dim": 256}, mask=("causal",)),
    Case("widest", **{**SMALL, "head_dim": 512, "value_dim": 300, "heads": 1, "kv_heads": 1}),
    Case("causal-dead", **{**SMALL, "queries": 61}, mask=("causal",), sinks=True),
    Case("window", **SMALL, mask=("window",), layout="bshd"),
    Case("diagonal", **SMALL, mask=("diagonal",), layout="sliced"),
    Case("document", **{**SMALL, "batch": 2}, mask=("document_each",), layout="strided"),
    Case("lengths", **{**SMALL, "batch": 3}, mask=("lengths", "causal", "and")),
    Case("nested", **SMALL, mask=("causal", "bool", "not", "or"), score=("bias",)),
    Case("scored", **SMALL, **GQA, score=("softcap_tight", "alibi", "bias_heads"), sinks=True),
    Case("holes", **SMALL, score=("bias_inf",), mask=("causal",)),
    Case("negative", **SMALL, scale=-0.7, layout="expanded"),
    Case("zero", **SMALL, scale=0.0, mask=("window",)),
    Case("dropout", **SMALL, **GQA, dropout_p=0.4, mask=("causal",)),
    Case(
        "packed",
        **GQA,
        head_dim=16,
        value_dim=8,
        mask=("causal",),
        sequences=((33, 20), (0, 5), (1, 40), (17, 0), (16, 16), (32, 32)),
        sinks=True,
    ),
    Case(
        "packed-all",
        head_dim=16,
        sequences=((20, 33), (35, 18)),
        layout="bshd",
        mask=("document_each", "window", "and"),
        score=("alibi_each", "bias"),
        dropout_p=0.2,
    ),
    Case("packed-none", sequences=(), mask=("causal",)),
]


def _in(blocks: Blocks) -> Forward:
    """The forward pass in these blocks."""
    return lambda problem, operands, statistics: forward(problem, operands, blocks, statistics)


def _check(case: Case, blocks: Blocks) -> None:
    check_case(case, _in(blocks))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_the_2x_rule_of_halves(case: Case, dtype: torch.dtype) -> None:
    """A sample of the same in 16 bits."""
    _check(case.of(dtype), BLOCKS[CASES.index(case) % len(BLOCKS)])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda blocks: f"{blocks.queries}x{blocks.keys}")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_2x_rule_everywhere(case: Case, dtype: torch.dtype, blocks: Blocks) -> None:
    """All of them in all dtypes and blocks."""
    _check(case.of(dtype), blocks)


PARTED = [
    Case("wide", **{**SMALL, "head_dim": 33, "value_dim": 64}, mask=("window",), sinks=True),
    Case("scored", **{**SMALL, **GQA, "head_dim": 40}, score=("softcap_tight",), dropout_p=0.4),
    Case("packed", head_dim=24, mask=("causal",), sequences=((33, 20), (0, 5), (16, 16))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PARTED, ids=lambda case: case.name)
def test_products_in_parts(case: Case, dtype: torch.dtype) -> None:
    """Scores summed over 16 columns at a time, of widths that are whole parts and that are none."""
    case = case.of(dtype)
    inputs, reference = refer_cached(case)
    problem, operands = problem_of(inputs.detached())
    config = Config("interpreter", overrides=(("forward", BLOCKS[1]),), parts=Parts(0, 0, 0, 0, 0))
    result, todo = prepare_forward(problem, operands, config, "top1")
    assert [launch.constants["FORM"].PART for launch in todo] == [16, 16]
    run(todo)
    assert_exact(result.out, reference.plain.out, reference.oracle.out, f"{case}: out")
    assert_exact(result.lse, reference.plain.lse, reference.oracle.lse, f"{case}: lse")
    expected = tiled.forward(problem, operands, "top1")
    for name in ("max_logit", "entropy", "top_key"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), msg=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_statistics(case: Case) -> None:
    check_statistics(
        *problem_of(build(case).detached()), _in(BLOCKS[CASES.index(case) % len(BLOCKS)])
    )


def test_the_first_of_equal_keys_is_the_top_one() -> None:
    """Whole blocks come before masked ones; a tie still goes to the first key."""
    q, k, v = torch.ones(1, 1, 40, 16), torch.ones(1, 1, 90, 16), torch.ones(1, 1, 90, 16)
    mask = masks.window(70, 0, align="bottom_right")
    keywords: dict[str, Any] = {"mask": mask, "return_lse": True, "return_stats": "top1"}
    _, _, stats = tilewise.attention(q, k, v, **keywords, backend="gpu")
    rows = torch.arange(40) + 50 - 70
    assert torch.equal(stats.top1[0, 0], rows.clamp(min=0))


def test_keys_that_are_excluded_may_be_nan() -> None:
    """Beyond a length, in the future of a whole tile, and in a tile that a document leaves out."""
    qkv = [torch.randn(2, 2, 70, 16) for _ in range(3)]
    ids = (torch.arange(70) >= 64).long()
    for mask, where in (
        (masks.lengths(torch.tensor([41, 70])), (0, slice(None), slice(41, None))),
        (masks.causal(), (slice(None), slice(None), slice(64, None))),
        (masks.document(ids), (slice(None), slice(None), slice(64, None))),
    ):
        check_hidden(mask, qkv, where, slice(64))


def test_a_visible_nan_is_seen() -> None:
    """A row that attends to a NaN gets one; rows that do not are as without."""
    q, k, v = (torch.randn(1, 1, 70, 16) for _ in range(3))
    good = tilewise.attention(q, k, v, mask=masks.causal(), backend="gpu")
    k[:, :, 69] = NAN
    out, lse, _ = tilewise.attention(q, k, v, mask=masks.causal(), backend="gpu", return_lse=True)
    assert bool(out[:, :, 69].isnan().all())
    assert bool(lse[:, :, 69].isnan().all())
    assert_same_bits(out[:, :, :64], good[:, :, :64], "rows of the tiles before")


def test_rows_keep_their_bits_in_any_company() -> None:
    """A sequence alone, among others, with other neighbours, and again."""
    case = Case("company", sequences=((35, 50), (1, 9), (70, 70)), **GQA, mask=("causal",))
    inputs = build(case).detached()
    assert inputs.cu_seqlens is not None
    whole = attend(inputs, "gpu")
    assert_same_bits(attend(inputs, "gpu").out, whole.out, "again")
    starts = [cu.tolist() for cu in inputs.cu_seqlens]
    for i in range(3):
        rows, keys = (slice(s[i], s[i + 1]) for s in starts)
        cu = tuple(torch.tensor([0, s.stop - s.start]) for s in (rows, keys))
        alone = inputs._replace(
            q=inputs.q[rows].clone(),
            k=inputs.k[keys].clone(),
            v=inputs.v[keys].clone(),
            cu_seqlens=(cu[0], cu[1]),
        )
        assert_same_bits(attend(alone, "gpu").out, whole.out[rows], f"sequence {i}")


@pytest.mark.parametrize("sequences", range(1, 10))
def test_programs_find_their_sequence(sequences: int) -> None:
    """However many there are, and wherever the empty ones stand."""
    generator = torch.Generator().manual_seed(sequences)
    counts = torch.randint(0, 50, (sequences,), generator=generator)
    counts[torch.randint(0, sequences, (2,), generator=generator)] = 0
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    q, k, v = (torch.randn(int(cu[-1]), 1, 16, generator=generator) for _ in range(3))
    got = tilewise.attention_varlen(q, k, v, cu, cu, backend="gpu")
    expected = tilewise.attention_varlen(q, k, v, cu, cu, backend="tiled")
    torch.testing.assert_close(got, expected)


def test_strides_of_out_follow_q() -> None:
    """[B, S, H, D] in memory stays so; a width of its own for the values."""
    q, k = (torch.randn(2, 33, 3, 24).transpose(1, 2) for _ in range(2))
    v = torch.randn(2, 3, 33, 40)
    got = tilewise.attention(q, k, v, backend="gpu")
    assert got.stride() == (33 * 3 * 40, 40, 3 * 40, 1)
    torch.testing.assert_close(got, tilewise.attention(q, k, v, backend="tiled"))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "interpreter"])
def test_launches_need_no_values(family: str) -> None:
    """On meta tensors the host side makes the same launches, for every chip."""
    sequences = ((20, 33), (35, 18))
    case = Case("meta", sequences=sequences, mask=("lengths",), score=("bias",), sinks=True)
    problem, operands = problem_of(build(case).detached())
    _, todo = prepare_forward(problem, on_meta(operands), config_for(family), "top1")
    assert [launch.kernel.__name__ for launch in todo] == ["attend", "describe"]
    blocks = config_for(family).blocks("forward", problem)
    for launch in todo:
        assert launch.grid == ((55 // blocks.queries + 2) * 2,)
        assert (launch.warps, launch.stages) == (blocks.warps, blocks.stages)
        assert None not in launch.arguments.values()


def test_a_launch_for_every_tile_and_no_more() -> None:
    """Dense grids are exact; packed ones have a bound that needs no lengths."""
    problem, operands = problem_of(build(Case("grid", queries=65, keys=9)).detached())
    config = Config("interpreter", overrides=(("forward", Blocks(32, 16, 4, 1)),))
    _, (launch,) = prepare_forward(problem, operands, config)
    assert launch.grid == (3 * 2 * 2,)
    empty = problem._replace(queries=0)
    _, (launch,) = prepare_forward(empty, operands._replace(q=operands.q[:, :, :0]), config)
    assert launch.grid == (0,)


def test_what_it_declines() -> None:
    """By name, each with its reason; and CPU tensors go to it by name only."""
    q = torch.randn(1, 1, 4, 8)
    assert tilewise.plan(q, q, q).backend != "gpu"
    assert tilewise.plan(q, q, q, backend="gpu").backend == "gpu"
    with pytest.raises(Unsupported, match="float32, bfloat16, float16, float8_e4m3fn; not"):
        tilewise.attention(q.double(), q.double(), q.double(), backend="gpu")
    wide = torch.randn(1, 1, 4, 577)
    with pytest.raises(Unsupported, match="D = 577 is over its limit of 576"):
        tilewise.attention(wide, wide, q, backend="gpu")
    with pytest.raises(Unsupported, match="Dv = 577 is over its limit of 512"):
        tilewise.attention(q, q, wide, backend="gpu")


def test_scores_that_are_the_lowest_float() -> None:
    """finfo.min on every key of a row is a mean, as in plain torch; -inf is a dead row."""
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    bias = torch.zeros(1, 1, 40, 40)
    bias[:, :, 5] = torch.finfo(torch.float32).min
    bias[:, :, 7] = -math.inf
    score = scores.bias(bias)
    out, lse, _ = tilewise.attention(q, k, v, score=score, backend="gpu", return_lse=True)
    torch.testing.assert_close(out[:, :, 5], v.mean(2))
    assert bool((out[:, :, 7] == 0).all())
    assert float(lse[0, 0, 7]) == -math.inf
    torch.testing.assert_close(
        (out, lse),
        tilewise.attention(q, k, v, score=score, backend="tiled", return_lse=True)[:2],
    )
