"""The sizes of the C++ core's loops that the model repeats, against the core's own headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plan.some_problems import problem
from tilelab.counted import fills
from tilewise.engine import registry
from tilewise.kernels.cpu import backend
from tilewise.plan.traffic.account import account

CSRC = Path(__file__).parents[2] / "csrc"


def constant(header: str, name: str) -> int:
    """What a header says a constant is."""
    found = re.findall(rf"constexpr [^;]*\b{name} = (\d+)\b", (CSRC / header).read_text())
    assert len(found) == 1, f"{name} in {header}: {found}"
    return int(found[0])


def test_the_constants() -> None:
    tile, block = (
        constant("base/tile_sizes.h", "kTileQueries"),
        constant("base/schedule.h", "kBlockKeys"),
    )
    least, most = (constant("passes/key_sums.h", name) for name in ("kChunkBlocks", "kMostChunks"))
    assert (tile, block, least) == (fills._TILE_QUERIES, fills._BLOCK_KEYS, fills._CHUNK_BLOCKS)
    assert block == backend._BLOCK_KEYS
    assert (least, most) == (backend._CHUNK_BLOCKS, backend._MOST_CHUNKS)
    assert constant("base/args.h", "kFewQueries") == backend._FEW_QUERIES
    split = tuple(constant("decode/tasks.h", name) for name in ("kSplitBlocks", "kMostSplits"))
    assert split == (backend._SPLIT_BLOCKS, backend._MOST_SPLITS)
    assert "kDecodeRows = kTileQueries;" in (CSRC / "decode/tasks.h").read_text()
    assert tile == backend._DECODE_ROWS


def test_the_formulas() -> None:
    """What ``loops`` makes of them is worked out as the core does it."""
    blocks = "count(max(1, (key_limit + size / 2) / size))"
    chunks = "per_chunk(max(kChunkBlocks, (blocks.count + kMostChunks - 1) / kMostChunks))"
    assert blocks in (CSRC / "base/schedule.h").read_text()
    assert chunks in (CSRC / "passes/key_sums.h").read_text()
    tasks = (CSRC / "decode/tasks.h").read_text()
    assert "max(kSplitBlocks, (blocks.count + kMostSplits - 1) / kMostSplits)" in tasks
    assert "x.heads = min(group_size_, kDecodeRows / seq.queries);" in tasks


@pytest.mark.parametrize("keys", [1, 63, 64, 1087, 1088, 8191, 8192, 8256, 16384, 70001])
def test_the_loops_of_the_core(keys: int) -> None:
    block, most = (
        constant("base/schedule.h", "kBlockKeys"),
        constant("passes/key_sums.h", "kMostChunks"),
    )
    count = max(1, (keys + block // 2) // block)
    each = max(constant("passes/key_sums.h", "kChunkBlocks"), -(-count // most))
    found = registry.load("cpu").loops(problem(keys=keys))
    assert found.backward == (constant("base/tile_sizes.h", "kTileQueries"), each * block)
    packed = registry.load("cpu").loops(problem(keys=keys, layout="varlen"))
    assert packed.backward == registry.load("cpu").loops(problem(keys=1)).backward


@pytest.mark.parametrize(
    ("queries", "group", "tile", "times"),
    [(1, 8, 8, 1), (8, 8, 64, 1), (8, 16, 64, 2), (5, 16, 60, 2), (1, 1, 1, 1)],
)
def test_few_queries_read_keys_once_for_a_group(
    queries: int, group: int, tile: int, times: int
) -> None:
    """As often as the heads of a group are cut, and in splits of 4 blocks or a 32nd of all."""
    kv_heads, keys = 2, 20000
    case = problem(queries=queries, heads=kv_heads * group, kv_heads=kv_heads, keys=keys)
    found = registry.load("cpu").loops(case)
    assert found.forward == (tile, 128)
    assert found.split_keys == 5 * 128
    parts, merge = account(case, found).forward.ours.passes
    head = case.batch * kv_heads * keys * case.dtype.itemsize
    read = {each.name: each.read for each in parts.operands}
    assert read["k"] == times * head * case.head_dim
    assert read["v"] == times * head * case.value_dim
    assert merge.name == "merge"
    assert registry.load("cpu").loops(case._replace(queries=9)).split_keys == 0
