"""Key lists by the core: the same sets and places as torch finds, and errors for what is wrong."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_all_same_bits
from tilewise import KeyBlocks, masks
from tilewise.engine import key_lists
from tilewise.engine.key_lists import Groups, Lists, Paging, Table, listed
from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu import absence, core
from tilewise.kernels.key_lists import union_sizes, unions

if absence() is not None:
    pytest.skip(f"no core: {absence()}", allow_module_level=True)

WIDTHS = (1, 7, 96, 97, 700)


def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_lists, "by_core", lambda _: False)


def _drawn(width: int, heads: int, most: int, *, wide: bool) -> Tensor:
    """Return lists [3, heads, 5, width]: repeats, -1, and some in order; of odd strides."""
    generator = torch.Generator().manual_seed(width + heads + most)
    found = torch.randint(-1, most, (5, width, 3, heads), generator=generator)
    found[:2] = found[:2].sort(dim=1).values
    return found.permute(2, 3, 0, 1).to(torch.int64 if wide else torch.int32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_sets(width: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and packed, of sequences of several lengths, in blocks whose last one is shorter."""
    monkeypatch.setattr("tilewise.kernels.key_lists.threads", lambda: threads)
    for block in (1, 3, 64):
        lengths = torch.tensor([70000, 70001, 70002]).repeat_interleave(5)
        for heads, wide in ((1, True), (2, False)):
            for most in (40, 70000 // block):
                lists = _drawn(width, heads, most, wide=wide)
                packed = lists.permute(1, 0, 2, 3).reshape(heads, 15, width)
                for each in (lists, packed):
                    mine = listed(KeyBlocks(each, block), lengths)
                    with monkeypatch.context() as patch:
                        _by_torch(patch)
                        due = listed(KeyBlocks(each, block), lengths)
                    assert_all_same_bits(mine, due, f"{block} {most}")


@pytest.mark.parametrize("value", [-2, 53, 2**40])
def test_the_first_wrong_index_is_named(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of lists, whatever the threads; also where int32 would make a key of it."""
    lists = torch.zeros(2, 2, 3000, 9, dtype=torch.int64)
    lists[1, 0, 7, 3] = lists[1, 1, 7, 1] = lists[1, 0, 2999, 0] = value
    lengths = torch.full((6000,), 53)
    for ways in (1, 2):
        monkeypatch.setattr("tilewise.kernels.key_lists.threads", lambda count=ways: count)
        with pytest.raises(InvalidArgument, match=f"{value} in list 3007 of head 0"):
            listed(KeyBlocks(lists, 1), lengths)
    _by_torch(monkeypatch)
    with pytest.raises(InvalidArgument, match=f"{value} in list 3007 of head 0"):
        listed(KeyBlocks(lists, 1), lengths)


@pytest.mark.parametrize("where", ["dense", "pages of a block", "packed", "paged"])
@pytest.mark.parametrize("heads", [1, 2])
def test_places(heads: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the lists of all heads and of each, all of them and some, and beyond their ends."""
    generator = torch.Generator().manual_seed(heads)
    block = 8 if where != "packed" else 3
    counts = torch.tensor([160, 160, 160] if where in ("dense", "pages of a block") else [8, 0, 67])
    item = torch.tensor([0, 0, 1, 2, 2, 2])
    groups = Groups(item, torch.arange(6), torch.full((6,), 3), counts[item])
    limits = -(-groups.keys // block)
    lists = torch.randint(0, 20, (heads, 6, 12), generator=generator)
    sets = listed(KeyBlocks(torch.minimum(lists, limits[:, None] - 1), block), groups.keys)
    starts = paging = None
    memory = torch.zeros(3, 160, 2, 16).transpose(1, 2)
    if where == "packed":
        starts, memory = counts.cumsum(0) - counts, torch.zeros(1, 75, 2, 16).transpose(1, 2)
    if where == "paged":
        table = torch.randint(0, 40, (3, 17), generator=generator, dtype=torch.int32)
        paging, memory = Paging(table, 4), torch.zeros(40, 4, 2, 16).transpose(1, 2)
    of = Lists(sets, groups, block, starts, paging)
    tables = (Table.of(memory, block if where == "pages of a block" else 1),) * 2
    for part in (slice(0, 6), slice(2, 5)):
        for with_keys in (False, True):
            mine = of.located(part, tables, memory.shape[2], 2, with_keys)
            with monkeypatch.context() as patch:
                _by_torch(patch)
                due = of.located(part, tables, memory.shape[2], 2, with_keys)
            assert torch.equal(mine.table, due.table)
            assert torch.equal(mine.lengths, due.lengths)
            if mine.keys is not None:
                assert due.keys is not None
                assert torch.equal(mine.keys, due.keys)
            assert (mine.keys is not None) == (with_keys and where != "pages of a block")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("limit", [1, 30, 2500])
def test_what_neighbours_read_together(
    limit: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and readers of unions, of whole groups and of a last one with fewer rows."""
    monkeypatch.setattr("tilewise.kernels.key_lists.threads", lambda: threads)
    generator = torch.Generator().manual_seed(limit)
    lists = torch.randint(-1, limit, (1, 2, 37, 21), generator=generator)
    lists[:, 1, 5:9] = -1
    sets = listed(KeyBlocks(lists, 1), torch.full((37,), limit)).indices
    first = torch.tensor([0, 16, 32])
    rows, limits = (37 - first).clamp(max=16), torch.full((3,), limit)
    sizes = union_sizes(sets, first, rows, limits)
    wide = int(sizes[..., -1].max()) + 2
    blocks, readers = unions(sets, first, rows, limits, wide)
    for group, head in product(range(3), range(2)):
        own = sets[first[group] : first[group] + rows[group], head]
        named = [set(row.tolist()) - {limit} for row in own]
        for power, size in enumerate(sizes[group, head].tolist()):
            parts = [named[at : at + (1 << power)] for at in range(0, len(named), 1 << power)]
            assert size == sum(len(set().union(*part)) for part in parts)
        together = sorted(set().union(*named))
        missing = wide - len(together)
        assert blocks[group, head].tolist() == together + [limit] * missing
        bits = [sum((key in row) << r for r, row in enumerate(named)) for key in together]
        assert readers[group, head].tolist() == bits + [0] * missing


def test_the_core_believes_no_group() -> None:
    """Of neighbouring rows: where they are, and how many."""
    sets, zero = torch.zeros(4, 1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    sizes, blocks = torch.zeros(1, 1, 5, dtype=torch.int64), torch.zeros(1, 1, 2, dtype=torch.int32)

    def unite(**changed: Any) -> None:
        given = {
            "threads": 1, "sets": sets, "first": zero, "rows": zero + 4, "limits": zero + 9,
            "sizes": sizes, "blocks": None, "readers": None,
        }  # fmt: skip
        core().key_unions(*(given | changed).values())

    unite()
    unite(sizes=None, blocks=blocks, readers=blocks.clone())
    for changed, what in (
        ({"threads": 0}, "one thread"),
        ({"sets": sets[0]}, "3 dimensions"),
        ({"sets": sets.long()}, "sets has another dtype"),
        ({"rows": zero + 5}, "of those that there are"),
        ({"rows": zero - 1}, "of those that there are"),
        ({"first": zero + 1}, "of those that there are"),
        ({"first": zero - 1}, "of those that there are"),
        ({"sets": sets.repeat(9, 1, 1), "rows": zero + 17}, "at most 16 rows"),
        ({"limits": zero - 1}, "blocks"),
        ({"limits": zero + 2**31}, "blocks"),
        ({"sizes": sizes[..., :4].contiguous()}, "sizes has 4 numbers where 5 are needed"),
        ({"sizes": None, "blocks": blocks[0], "readers": blocks}, "blocks must have 3"),
        ({"sizes": None, "blocks": blocks, "readers": blocks[..., :1]}, "readers has 1 numbers"),
    ):
        with pytest.raises(ValueError, match=what):
            unite(**changed)


def test_the_core_believes_no_size() -> None:
    """Tensors of another size, dtype or order than the lists need."""
    lists, lengths = torch.zeros(1, 1, 4, 3, dtype=torch.int32), torch.full((4,), 9)
    sets, counts = torch.zeros(4, 1, 3, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int64)
    assert core().key_sets(1, 1, lists, lengths, sets, counts) == -1
    for wrong, what in (
        ((0, 1, lists, lengths, sets, counts), "one thread"),
        ((1, 0, lists, lengths, sets, counts), "a block one key"),
        ((1, 1, lists.float(), lengths, sets, counts), "int32 or int64"),
        ((1, 1, lists[0, 0], lengths, sets, counts), "3 or 4 dimensions"),
        ((1, 1, lists, lengths[:3], sets, counts), "lengths has 3 numbers where 4 are needed"),
        ((1, 1, lists, lengths, sets.long(), counts), "sets has another dtype"),
        ((1, 1, lists, lengths, sets.transpose(0, 2), counts), "sets must be contiguous"),
    ):
        with pytest.raises(ValueError, match=what):
            core().key_sets(*wrong)
    item, numbers = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2, 3, dtype=torch.int32)
    own, table = torch.zeros(8, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)

    def pages(**changed: Any) -> None:
        given = {
            "threads": 1, "sizes": (1, 1, 9, 5), "steps": (9, 0, 1), "sets": sets,
            "counts": counts, "item": item, "lengths": lengths, "starts": None, "table": table,
            "numbers": numbers, "key_lengths": own, "keys": None,
        }  # fmt: skip
        core().key_pages(*(given | changed).values())

    pages()
    for changed, what in (
        ({"threads": 0}, "one thread"),
        ({"sizes": (4, 3, 9, 5)}, "divide a block"),
        ({"sizes": (1, 1, 9, 4)}, "more keys than its block table"),
        ({"item": item + 1}, "none of those that there are"),
        ({"item": item - 1}, "none of those that there are"),
        ({"numbers": numbers[:3]}, "numbers has 18 numbers where 24 are needed"),
        ({"sets": torch.zeros(4, 3, 3, dtype=torch.int32)}, "of one head or of all"),
    ):
        with pytest.raises(ValueError, match=what):
            pages(**changed)


# Of torch's operations that one call starts; each costs 1 to 5 us.
MOST = {"dense": 16, "causal": 20, "pages": 30}


@pytest.mark.parametrize("way", MOST)
def test_decoding_starts_few_operations(way: str) -> None:
    """A call by lists costs the host little beside one over all keys."""
    q, (k, v) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 1, 256, 64).unbind()
    keys: dict[str, Any] = {"keys": torch.randperm(256)[:32].int().view(1, 1, 1, 32)}

    def call() -> Tensor:
        if way != "pages":
            mask = masks.causal() if way == "causal" else None
            out: Tensor = tilewise.attention(q, k, v, mask=mask, **keys)
            return out
        k_pages, v_pages = (x.view(16, 1, 16, 64) for x in (k, v))
        found: Tensor = tilewise.attention_paged(q, k_pages, v_pages, table, lengths, **keys)
        return found

    table, lengths = torch.arange(16, dtype=torch.int32)[None], torch.tensor([256]).int()
    call()  # what is made once: the plan, and the facts of a signature
    with torch.autograd.profiler.profile(use_kineto=False) as seen:
        call()
    started = [
        x.name
        for x in seen.function_events
        if x.name.startswith("aten::")
        and (x.cpu_parent is None or not x.cpu_parent.name.startswith("aten::"))
    ]
    assert started  # else nothing was seen
    assert len(started) <= MOST[way], started
