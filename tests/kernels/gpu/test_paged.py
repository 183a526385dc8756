"""Keys in pages in Triton's interpreter: exactness, what must not be read, and bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from tests import paged as pages
from tests.cases import Case, Inputs, build
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.gpu import passes
from tests.kernels.gpu.guard import GuardError
from tests.kernels.gpu.passes import BLOCKS, forward, on_meta, prepare_forward
from tests.oracle import problem_of, refer_cached
from tests.paged import Paged, in_pages, sequences_of
from tilewise import BlockMask, masks
from tilewise.errors import Unsupported
from tilewise.kernels.gpu.backend import GpuBackend
from tilewise.kernels.gpu.config import FAMILIES, Blocks, config_for
from tilewise.problem import Operands, Problem

GQA = {**passes.GQA, "head_dim": 16, "value_dim": 16}
LENGTHS = ((33, 20), (0, 5), (1, 40), (17, 0), (16, 16))
CASES = [
    Case("plain", **GQA, sequences=LENGTHS),
    Case("causal", **GQA, sequences=LENGTHS, mask=("causal",), sinks=True),
    Case("narrow", **{**GQA, "head_dim": 5, "value_dim": 33}, sequences=LENGTHS, mask=("window",)),
    Case("document", **GQA, sequences=LENGTHS, mask=("document_each",), score=("alibi_each",)),
    Case("scored", **GQA, sequences=LENGTHS, mask=("lengths",), score=("softcap", "bias")),
    Case("nested", **GQA, sequences=LENGTHS, mask=("causal", "bool", "not", "or"), scale=-0.7),
    Case("equal", **GQA, sequences=((7, 20), (7, 0), (7, 70)), mask=("window",), sinks=True),
]
PAGES = (1, 3, 16, 17, 32, 64, 128)


def paged_problem_of(inputs: Inputs, paged: Paged, dense: bool) -> tuple[Problem, Operands]:
    """The problem and operands of packed inputs with their keys in pages."""
    problem, operands = pages.paged_problem_of(*problem_of(inputs), paged)
    if dense:
        q = operands.q.unflatten(0, (problem.batch, -1)).transpose(1, 2)
        problem = problem._replace(layout="dense", queries=q.shape[2])
        operands = operands._replace(q=q, cu_seqlens_q=None)
    return problem, operands


def _check(case: Case, page_size: int, blocks: Blocks) -> None:
    inputs, reference = refer_cached(case)
    inputs = inputs.detached()
    paged = in_pages(*sequences_of(inputs), page_size, rows_first=blocks is BLOCKS[0])
    dense = case.name == "equal"
    got = forward(*paged_problem_of(inputs, paged, dense), blocks)
    out, lse = got.out, got.lse
    if dense:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert_exact(out, reference.plain.out, reference.oracle.out, f"{case}: out")
    assert_exact(lse, reference.plain.lse, reference.oracle.lse, f"{case}: lse")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_2x_rule_in_small_blocks(case: Case) -> None:
    """Pages smaller and larger than a block of keys, and such as do not divide it."""
    index = CASES.index(case)
    for page_size in (PAGES[index], PAGES[(index + 3) % len(PAGES)]):
        _check(case, page_size, BLOCKS[index % len(BLOCKS)])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda blocks: f"{blocks.queries}x{blocks.keys}")
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_2x_rule_everywhere(
    case: Case, dtype: torch.dtype, page_size: int, blocks: Blocks
) -> None:
    """All of them in all dtypes, pages and blocks."""
    _check(case.of(dtype), page_size, blocks)


def attend(inputs: Inputs, paged: Paged, **keywords: Any) -> Any:
    """The public call over packed inputs."""
    assert inputs.cu_seqlens is not None
    given = {name: inputs.keywords()[name] for name in ("mask", "score", "sinks", "scale")}
    options = {**given, "backend": "gpu", "return_lse": True, **keywords}
    return tilewise.attention_paged(inputs.q, *paged, inputs.cu_seqlens[0], **options)


@pytest.mark.parametrize("name", ["causal", pytest.param("document", marks=pytest.mark.slow)])
def test_the_bits_are_those_of_the_sequences(name: str) -> None:
    """Whatever the pages, their order, the table's width, the mates and the spare pages are."""
    inputs = build(next(case for case in CASES if case.name == name)).detached()
    assert inputs.cu_seqlens is not None
    packed = (inputs.q, inputs.k, inputs.v, *inputs.cu_seqlens)
    keywords = {**inputs.keywords(), "backend": "gpu", "return_lse": True}
    expected = tilewise.attention_varlen(*packed, **keywords)
    keys, values = sequences_of(inputs)
    for page_size, others in (
        (3, {}),
        (16, {"rows_first": True}),
        (16, {"seed": 1, "spare": 7}),
        (64, {"spare": 0}),
    ):
        got = attend(inputs, in_pages(keys, values, page_size, **others))
        assert_same_bits(got.out, expected.out, f"out, pages of {page_size}, {others}")
        assert_same_bits(got.lse, expected.lse, f"lse, pages of {page_size}, {others}")


def test_a_sequence_alone_has_the_same_bits() -> None:
    """Dense queries: one batch item, and the same one among others in a wider table."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (
        [torch.randn(2, n, 16, generator=generator) for n in (70, 9, 33)] for _ in range(2)
    )
    q = torch.randn(3, 4, 5, 16, generator=generator)
    options: dict[str, Any] = {"mask": masks.causal(), "backend": "gpu"}
    whole = tilewise.attention_paged(q, *in_pages(keys, values, 16, spare=3), **options)
    for b in range(3):
        alone = in_pages([keys[b]], [values[b]], 16, seed=b, spare=0)
        got = tilewise.attention_paged(q[b : b + 1], *alone, **options)
        assert_same_bits(got, whole[b : b + 1], f"sequence {b}")


def test_statistics_count_within_a_sequence() -> None:
    inputs = build(CASES[1]).detached()
    paged = in_pages(*sequences_of(inputs), 3)
    got = attend(inputs, paged, return_stats="top1")
    expected = attend(inputs, paged, return_stats="top1", backend="tiled")
    assert_same_bits(got.out, attend(inputs, paged).out, "out")
    torch.testing.assert_close(got.stats, expected.stats)


@pytest.mark.parametrize(
    "page_size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (16, 64))]
)
def test_a_table_of_tiles_skips_and_does_not_mask(page_size: int) -> None:
    """A BlockMask of the lengths, and a layout, whose rectangles are not the kernel's blocks."""
    sizes = {**GQA, "heads": 2, "kv_heads": 1}  # whole tiles of the kernel's among them
    inputs = build(Case("table", **sizes, sequences=((64, 70), (64, 33), (9, 0)))).detached()
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    paged = in_pages(*sequences_of(inputs), page_size, spare=4)
    window = masks.window(10, 0)
    found = attend(inputs, paged, mask=window)
    for block in ((16, 16), (48, 24)):
        table = BlockMask.of(window, block=block, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        torch.testing.assert_close(attend(inputs, paged, mask=table).out, found.out)
    for tiles in (torch.rand(4, 5) < 0.5, torch.ones(4, 5).bool()):
        layout = BlockMask.from_layout(tiles, (16, 16))
        expected = attend(inputs, paged, mask=layout, backend="tiled")
        torch.testing.assert_close(attend(inputs, paged, mask=layout), expected)


def _small() -> tuple[Problem, Operands]:
    """Two sequences of 20 and 37 keys in pages of 8."""
    inputs = build(Case("small", **GQA, sequences=((5, 20), (5, 37)))).detached()
    return paged_problem_of(inputs, in_pages(*sequences_of(inputs), 8, spare=3), True)


def test_what_is_out_of_range_is_clamped() -> None:
    """Nobody reads the values on a device: a wrong one gives numbers, and no access elsewhere."""
    problem, operands = _small()
    assert operands.block_table is not None
    table = operands.block_table
    pages = (torch.randn_like(operands.k), torch.randn_like(operands.v))
    operands = operands._replace(k=pages[0], v=pages[1])
    capacity = problem.keys
    for lengths, meant in (((20, 10**6), (20, capacity)), ((-5, 37), (0, 37))):
        found = forward(
            problem,
            operands._replace(key_lengths=torch.tensor(lengths, dtype=torch.int32)),
            BLOCKS[0],
        )
        wanted = operands._replace(
            key_lengths=torch.tensor(meant, dtype=torch.int32),
            block_table=table.clamp(0, len(pages[0]) - 1),
        )
        assert_same_bits(found.out, forward(problem, wanted, BLOCKS[0]).out, f"{lengths}")
    nothing = operands._replace(k=pages[0][:0], v=pages[1][:0])
    assert bool((forward(problem, nothing, BLOCKS[0]).out == 0).all())


def test_entries_beyond_a_sequence_are_not_even_read() -> None:
    """The table may end where the last sequence's keys do."""
    problem, operands = _small()
    assert operands.block_table is not None
    wide = operands.block_table.new_full((2, problem.keys // 8 + 3), -1)
    wide[:, : operands.block_table.shape[1]] = operands.block_table
    expected = forward(problem, operands, BLOCKS[2]).out
    cut = wide[:, :5].contiguous()
    problem = problem._replace(keys=40)
    got = forward(problem, operands._replace(block_table=cut), BLOCKS[2]).out
    assert_same_bits(got, expected, "a table of 5 pages for 37 keys, read in blocks of 32")
    short = cut.flatten()[:-1]  # the guard sees one that is too short
    with pytest.raises(GuardError):
        forward(problem, operands._replace(block_table=short), BLOCKS[2])


def test_no_pages_at_all() -> None:
    """Nor a slot for one: rows without keys."""
    q = torch.randn(2, 4, 3, 16)
    for held, slots in ((0, 0), (0, 2), (3, 0), (3, 2)):
        pages = torch.full((held, 2, 16, 16), math.nan)
        table = torch.full((2, slots), -1, dtype=torch.int32)
        nothing = torch.zeros(2, dtype=torch.int32)
        out, lse, _ = tilewise.attention_paged(
            q, pages, pages, table, nothing, backend="gpu", return_lse=True
        )
        assert bool((out == 0).all())
        assert bool((lse == -math.inf).all())


def test_it_declines_a_table_for_more_keys_than_it_counts() -> None:
    problem, _ = _small()
    assert GpuBackend().why_not(problem) == []
    reasons = GpuBackend().why_not(problem._replace(keys=2**31))
    assert any("block table for 2147483648 keys is over its limit" in why for why in reasons)
    with pytest.raises(Unsupported, match="no gradients of paged keys"):
        tilewise.attention_paged(
            torch.zeros(1, 1, 1, 16, requires_grad=True),
            *in_pages([torch.zeros(1, 3, 16)], [torch.zeros(1, 3, 16)], 16),
            backend="gpu",
        )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "interpreter"])
def test_launches_need_no_values(family: str) -> None:
    """On meta tensors the host side makes the same launches, for every chip."""
    problem, operands = _small()
    found = prepare_forward(problem, on_meta(operands), config_for(family), "top1")[1]
    expected = prepare_forward(problem, operands, config_for(family), "top1")[1]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.grid == theirs.grid
        assert mine.constants == theirs.constants
        assert mine.constants["FORM"].PAGE == 8
        assert mine.arguments.keys() == theirs.arguments.keys()


def test_pages_change_the_blocks_of_no_size() -> None:
    """Blocks are those of packed keys, whatever the pages and the table's width are."""
    problem, _ = _small()
    for family in FAMILIES:
        config = config_for(family)
        packed = config.blocks("forward", problem._replace(layout="varlen", page_size=0))
        for page_size, keys in ((1, 40), (16, 4096), (128, 2**20)):
            other = problem._replace(page_size=page_size, keys=keys)
            assert config.blocks("forward", other) == packed
