"""The account of a plan, and the choice that goes by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tilewise
from tests.plan.some_problems import problem
from tilelab.counted import cases
from tilewise.engine import dispatch
from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu import backend
from tilewise.plan import Candidate, Choice, choose
from tilewise.plan.loops import Loops
from tilewise.plan.traffic import Account, account, cached, cost, plain
from tilewise.plan.traffic.count import Traffic
from tilewise.variants import masks, scores

SMALL = Loops((16, 16), "by_tiles", (16, 16))
LARGE = Loops((128, 16), "keys_outside", (64, 64))


def test_the_cheapest_is_chosen() -> None:
    able = [Candidate("dear", (), cost=9), Candidate("cheap", (), cost=5)]
    assert choose(able) == Choice("cheap")
    assert choose([able[0], able[1]._replace(reasons=("no",))]) == Choice("dear")


def test_preference_decides_where_costs_do_not() -> None:
    same = [Candidate("first", (), cost=5), Candidate("second", (), cost=5)]
    assert choose(same) == Choice("first")
    unknown = [Candidate("first", ()), Candidate("second", (), cost=1)]
    assert choose(unknown) == Choice("first")


def test_a_cheap_last_resort_is_still_the_last() -> None:
    given = [Candidate("real", (), cost=100), Candidate("slow", (), last_resort=True, cost=1)]
    assert choose(given) == Choice("real")
    declines = [given[0]._replace(reasons=("cannot",)), given[1]]
    assert choose(declines) == Choice(None)
    absent = [given[0]._replace(reasons=("not built",), absent=True), given[1]]
    assert choose(absent) == Choice("slow", slow=True)


@pytest.mark.parametrize("loops", [SMALL, LARGE])
def test_a_cost_knows_neither_batch_nor_heads(loops: Loops) -> None:
    """What decides about rounding depends on a row's own sequence."""
    case = problem(1, 1, 1, 200, 300, mask=masks.causal().program)
    costs = {
        cost(case._replace(batch=b, heads=h, kv_heads=k), loops)
        for b, h, k in ((1, 1, 1), (7, 1, 1), (3, 6, 6), (3, 6, 2))
    }
    assert len(costs) == 1
    assert cost(case, SMALL) != cost(case, LARGE)


def test_no_cost_where_tensors_would_be_looked_at() -> None:
    lengths = masks.lengths(torch.tensor([3])).program
    assert cost(problem(mask=lengths), SMALL) is None
    assert cost(problem(layout="varlen"), SMALL) is None


def test_each_backend_has_its_order() -> None:
    case = problem(queries=4096, keys=4096)
    found = {name: dispatch.load(name).loops(case, "sm_90") for name in dispatch.BACKEND_NAMES}
    assert found["cpu"].order == "keys_outside"
    assert found["gpu"].order == "by_tiles"
    assert found["tiled"].order == "rows_outside"
    made = {name: account(case, loops).backward.ours for name, loops in found.items()}
    assert [one.name for one in made["gpu"].passes] == ["delta", "dq", "dkdv"]
    assert [one.name for one in made["cpu"].passes] == ["delta", "dqkv"]
    assert made["gpu"].flops == made["cpu"].flops * 7 // 5


def test_the_core_computes_the_blocks_of_a_chunk_that_rows_see() -> None:
    """Bytes follow the chunk of keys that stays, operations its blocks: half of a causal mask."""
    case = problem(1, 1, 1, 1024, 1024, mask=masks.causal().program)
    loops = dispatch.load("cpu").loops(case)
    assert loops.backward[1] == 1024
    found, whole = account(case, loops), account(case, loops._replace(blocks=None))
    assert found.backward.ours.flops == found.forward.ours.flops * 5 // 2
    assert found.backward.ours.bytes == whole.backward.ours.bytes
    full = account(case._replace(mask=()), loops).backward.ours.flops
    assert whole.backward.ours.flops == full
    assert 0.5 < found.backward.ours.flops / full < 0.6


def test_a_plan_has_its_account_when_it_is_asked_for() -> None:
    x = torch.zeros(2, 4, 96, 16)
    held = tilewise.plan(x, x, x, mask=masks.causal())
    cached.cache_clear()
    assert cached.cache_info().currsize == 0
    found = held.account
    assert isinstance(found, Account)
    assert held.account is found
    assert found.forward.ours.bytes < found.forward.plain.bytes
    assert found.both.ours.flops == found.forward.ours.flops + found.backward.ours.flops


def test_a_call_asks_for_no_account() -> None:
    x = torch.zeros(1, 2, 33, 8)
    cached.cache_clear()
    tilewise.attention(x, x, x, mask=masks.causal())
    assert cached.cache_info().misses == 0


def test_a_plan_without_its_tensors_says_where_they_are_wanted() -> None:
    x = torch.zeros(1, 2, 33, 8)
    held = tilewise.plan(x, x, x, mask=masks.lengths(torch.tensor([20])))
    with pytest.raises(InvalidArgument, match="operands"):
        _ = held.account


def test_keys_in_parts() -> None:
    """A group that walks together reads its keys once; partial results come on top."""
    case = problem(2, 8, 2, 1, 4096)
    whole = account(case, LARGE).forward.ours
    split = account(case, LARGE._replace(split_keys=512, shared=True)).forward.ours
    named = {one.name: one for one in split.operands}
    assert named["k"].read * 4 == next(x for x in whole.operands if x.name == "k").read
    assert named["partial"].read == named["partial"].written == 2 * 8 * 8 * (32 + 2) * 4
    assert split.flops == whole.flops


def test_sequences_are_accounted_for() -> None:
    x = torch.zeros(30, 2, 8)
    cu = torch.tensor([0, 10, 30])
    found = tilewise.explain(x, x, x, cu, cu, mask=masks.causal()).account
    assert found is not None
    assert found.visits.all_pairs == 2 * (100 + 400)
    assert found.forward.plain.exponentials == 2 * (100 + 400)
    assert found.held() is None


# ---- Plain attention, pass by pass.


CAUSAL = masks.causal().program
MATRIX = 2 * 4 * 64 * 64 * 2  # B Hq M N e
ROWS = 2 * 4 * 64 * 32 * 2  # an operand


def names(traffic: Traffic) -> list[str]:
    return [each.name for each in traffic.passes]


def test_algorithm_0() -> None:
    """Q and K read, S written, S read, P written, P and V read, O written."""
    traffic = plain.forward(problem())
    assert names(traffic) == ["scores", "softmax", "product"]
    assert [each.bytes for each in traffic.passes] == [
        2 * ROWS + MATRIX,
        2 * MATRIX,
        2 * ROWS + MATRIX,
    ]
    assert traffic.flops == 2 * 2 * (2 * 4 * 64 * 64) * 32
    assert traffic.exponentials == 2 * 4 * 64 * 64


def test_algorithm_3() -> None:
    traffic = plain.backward(problem())
    assert names(traffic) == ["dv", "dp", "softmax", "dq", "dk"]
    assert traffic.bytes == 7 * MATRIX + 8 * ROWS
    assert traffic.flops == 4 * 2 * (2 * 4 * 64 * 64) * 32


def test_mask_and_dropout_make_it_18_passes() -> None:
    case = problem(mask=CAUSAL, dropout_p=0.1)
    forward, backward = plain.forward(case), plain.backward(case)
    mask = 64 * 64 * 2
    assert forward.bytes + backward.bytes == 18 * MATRIX + 12 * ROWS + mask
    assert names(forward) == ["scores", "mask", "softmax", "dropout", "product"]
    filled = plain.backward(case, mask="fill")
    assert filled.bytes - backward.bytes == 2 * MATRIX + mask


def test_a_score_is_a_pass_for_each_step() -> None:
    score = (*scores.softcap(5.0).program, *scores.softcap(3.0).program)
    case = problem(score=score)
    assert plain.forward(case).bytes - plain.forward(problem()).bytes == 4 * MATRIX
    assert plain.backward(case).bytes - plain.backward(problem()).bytes == 4 * MATRIX
    assert plain.forward(case).omitted


def test_groups_are_repeated_and_summed() -> None:
    case = problem(kv_heads=2)
    forward, backward = plain.forward(case), plain.backward(case)
    assert names(forward)[0] == "repeat"
    assert forward.passes[0].bytes == 2 * (ROWS // 2 + ROWS)
    assert names(backward)[-1] == "sum groups"
    assert backward.passes[-1].bytes == 2 * (ROWS + ROWS // 2)


def test_eight_bits_become_sixteen_first() -> None:
    """q, k and v are read in one byte and written in two; all else is as in bfloat16."""
    case = problem(kv_heads=2, dtype=torch.float8_e4m3fn)
    forward = plain.forward(case)
    wide = plain.forward(case._replace(dtype=torch.bfloat16))
    assert names(forward) == ["convert", *names(wide)]
    convert = forward.passes[0]
    assert [(each.name, each.read * 2 == each.written) for each in convert.operands] == [
        ("q", True),
        ("k", True),
        ("v", True),
    ]
    assert convert.bytes == (ROWS + 2 * (ROWS // 2)) * 3 // 2
    assert forward.bytes - wide.bytes == convert.bytes
    assert {each.dtype for each in forward.passes} == {"bfloat16"}
    assert {each.dtype for each in wide.passes} == {""}


def test_pages_are_gathered_first() -> None:
    """Copied by a table of four bytes an entry, once for the keys and once for the values."""
    lengths = [(3, 33), (5, 16), (1, 0)]
    case = problem(batch=3, queries=9, keys=48, kv_heads=2, layout="varlen")
    packed = plain.forward(case, lengths)
    paged = plain.forward(case._replace(page_size=16), lengths)
    assert names(paged) == ["gather", *names(packed)]
    copied = 2 * 49 * 32 * 2  # of k, and of v
    assert paged.passes[0].bytes == 2 * (3 + 1) * 4 + 2 * 2 * copied
    with pytest.raises(InvalidArgument, match="lengths"):
        plain.forward(case._replace(page_size=16, layout="dense"))
    narrow = plain.forward(case._replace(page_size=16, stored=torch.int8), lengths)
    assert names(narrow) == ["gather", "convert", *names(packed)]
    stored = 2 * 2 * 49 * (32 + 4)  # of both: a byte for a number, four for a row's scale
    assert narrow.passes[0].bytes == 2 * (3 + 1) * 4 + 2 * stored
    assert narrow.passes[1].bytes == stored + 2 * copied


def test_sequences_are_done_one_by_one() -> None:
    lengths = [(3, 5), (0, 4), (7, 1)]
    case = problem(batch=3, queries=10, keys=10, layout="varlen")
    pairs = 4 * (15 + 0 + 7)
    forward = plain.forward(case, lengths)
    assert forward.exponentials == pairs
    assert forward.bytes == 4 * pairs * 2 + 4 * (4 * 10 * 32 * 2)
    with pytest.raises(InvalidArgument, match="lengths"):
        plain.forward(case)


# ---- The sizes of the C++ core's loops that the model repeats, against the core's own headers.


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
    assert (tile, block, least) == (cases._TILE_QUERIES, cases._BLOCK_KEYS, cases._CHUNK_BLOCKS)
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
    found = dispatch.load("cpu").loops(problem(keys=keys))
    assert found.backward == (constant("base/tile_sizes.h", "kTileQueries"), each * block)
    packed = dispatch.load("cpu").loops(problem(keys=keys, layout="varlen"))
    assert packed.backward == dispatch.load("cpu").loops(problem(keys=1)).backward


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
    found = dispatch.load("cpu").loops(case)
    assert found.forward == (tile, 128)
    assert found.split_keys == 5 * 128
    parts, merge = account(case, found).forward.ours.passes
    head = case.batch * kv_heads * keys * case.dtype.itemsize
    read = {each.name: each.read for each in parts.operands}
    assert read["k"] == times * head * case.head_dim
    assert read["v"] == times * head * case.value_dim
    assert merge.name == "merge"
    assert dispatch.load("cpu").loops(case._replace(queries=9)).split_keys == 0
