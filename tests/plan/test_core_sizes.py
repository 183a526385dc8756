"""The sizes of the C++ core's loops that the model repeats, against the core's own headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plan.some_problems import problem
from tilewise.engine import registry
from tilewise.kernels.cpu import backend
from tilewise.plan.traffic import fills

CSRC = Path(__file__).parents[2] / "csrc"


def constant(header: str, name: str) -> int:
    """What a header says a constant is."""
    found = re.findall(rf"constexpr int {name} = (\d+);", (CSRC / header).read_text())
    assert len(found) == 1, f"{name} in {header}: {found}"
    return int(found[0])


def test_the_constants() -> None:
    tile, block = constant("tile_sizes.h", "kTileQueries"), constant("schedule.h", "kBlockKeys")
    least, most = (constant("key_sums.h", name) for name in ("kChunkBlocks", "kMostChunks"))
    assert (tile, block, least) == (fills._TILE_QUERIES, fills._BLOCK_KEYS, fills._CHUNK_BLOCKS)
    assert block == backend._BLOCK_KEYS
    assert (least, most) == (backend._CHUNK_BLOCKS, backend._MOST_CHUNKS)


def test_the_formulas() -> None:
    """What ``loops`` makes of them is worked out as the core does it."""
    blocks = "count(max(1, (key_limit + kBlockKeys / 2) / kBlockKeys))"
    chunks = "per_chunk(max(kChunkBlocks, (blocks.count + kMostChunks - 1) / kMostChunks))"
    assert blocks in (CSRC / "schedule.h").read_text()
    assert chunks in (CSRC / "key_sums.h").read_text()


@pytest.mark.parametrize("keys", [1, 63, 64, 1087, 1088, 8191, 8192, 8256, 16384, 70001])
def test_the_loops_of_the_core(keys: int) -> None:
    block, most = constant("schedule.h", "kBlockKeys"), constant("key_sums.h", "kMostChunks")
    count = max(1, (keys + block // 2) // block)
    each = max(constant("key_sums.h", "kChunkBlocks"), -(-count // most))
    found = registry.load("cpu").loops(problem(keys=keys))
    assert found.backward == (constant("tile_sizes.h", "kTileQueries"), each * block)
    packed = registry.load("cpu").loops(problem(keys=keys, layout="varlen"))
    assert packed.backward == registry.load("cpu").loops(problem(keys=1)).backward
