"""Fills: passes against a cache that is simulated, and the core's loops at their ends."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.some_problems import problem
from tilelab.counted.cases import core_backward, core_forward, fetched, fills
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import plain, tiled
from tilewise.plan.traffic.count import Operand, Pass, Sharing, Traffic
from tilewise.plan.traffic.visits import visits_of
from tilewise.problem import Problem
from tilewise.variants import masks

LARGE = 2**30


def single(**more: object) -> Problem:
    """float32, one head, unless ``more`` says otherwise."""
    fields = {"batch": 1, "heads": 1, "kv_heads": 1, "dtype": torch.float32, **more}
    return problem(**fields)  # type: ignore[arg-type]


def simulated(passes: list[dict[str, int]], capacity: int) -> int:
    """Misses of an LRU cache while operands of so many lines are gone over in step."""
    cache: OrderedDict[tuple[str, int], None] = OrderedDict()
    misses = 0
    for sizes in passes:
        touched = [((i + 0.5) / n, name, i) for name, n in sizes.items() for i in range(n)]
        for _, name, line in sorted(touched, key=lambda each: each[0]):
            if (name, line) in cache:
                cache.move_to_end((name, line))
                continue
            misses += 1
            cache[name, line] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return misses


@given(
    passes=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.integers(100, 400), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    capacity=st.integers(0, 1500),
)
@settings(max_examples=150, deadline=None)
def test_passes_against_a_simulated_cache(passes: list[dict[str, int]], capacity: int) -> None:
    """An operand has one size, whatever pass goes over it."""
    sizes = {name: size for each in passes for name, size in each.items()}
    passes = [{name: sizes[name] for name in each} for each in passes]
    traffic = Traffic(
        tuple(Pass("p", tuple(Operand(n, s) for n, s in each.items())) for each in passes)
    )
    # Where an operand is left out for a pass, lines of others are counted between that were there.
    predicted = fills(traffic, capacity).bytes
    counted = simulated(passes, capacity)
    repeats = any(set(a) & set(b) for a, b in zip(passes, passes[2:], strict=False))
    if not repeats:
        assert predicted == pytest.approx(counted, abs=4 * len(passes) * len(sizes))
    else:
        assert predicted >= counted - 4 * len(passes) * len(sizes)


def walked(walks: list[range], capacity: int) -> int:
    """Misses of an LRU cache of so many keys while walks follow one another."""
    return simulated([{f"key {key}": 1 for key in walk} for walk in walks], capacity)


@given(
    ends=st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True),
    turned=st.booleans(),
    capacity=st.integers(0, 50),
)
@settings(max_examples=200, deadline=None)
def test_walks_of_a_causal_mask_against_a_simulated_cache(
    ends: list[int], turned: bool, capacity: int
) -> None:
    """Longer and longer ones, or shorter and shorter ones, in two heads of a group."""
    walks = [range(end) for end in sorted(ends, reverse=turned)]
    assert fetched(walks, 8, 8 * capacity) == walked(walks, capacity)
    both = fetched(walks * 2, 8, 8 * capacity)
    assert (
        both == walked(walks * 2, capacity) if not turned else both >= walked(walks * 2, capacity)
    )


@given(
    width=st.integers(1, 20),
    step=st.integers(-8, 8),
    count=st.integers(1, 8),
    capacity=st.integers(0, 90),
)
@settings(max_examples=200, deadline=None)
def test_walks_of_a_window_against_a_simulated_cache(
    width: int, step: int, count: int, capacity: int
) -> None:
    walks = [range(100 + i * step, 100 + i * step + width) for i in range(count)]
    assert fetched(walks, 8, 8 * capacity) == walked(walks, capacity)


def test_walks_of_nothing() -> None:
    assert fetched([], 8, 100) == 0
    assert fetched([range(4), range(0), range(4)], 8, 31) == 8
    assert fetched([range(4), range(0), range(4)], 8, 32) == 4


def test_plain_attention_behind_nothing_is_what_it_moves() -> None:
    """Every pass fills what it reads and what it writes: 4 matrices forward, 7 backward."""
    asked = single(queries=100, keys=70)
    for made in (plain.forward(asked), plain.backward(asked)):
        assert fills(made, 0).bytes == made.bytes
    matrix = 100 * 70 * 4
    both = [fills(f(asked), 0).bytes // matrix for f in (plain.forward, plain.backward)]
    operands = 4 * 32 * (2 * 100 + 2 * 70)
    assert both[0] == (4 * matrix + operands) // matrix


def test_what_is_changed_in_place_is_filled_once() -> None:
    asked = single(mask=masks.causal().program)
    made = plain.forward(asked)
    matrix = 64 * 64 * 4
    assert made.bytes - fills(made, 0).bytes == matrix


def test_plain_attention_that_fits_fills_everything_once() -> None:
    asked = single(queries=100, keys=70)
    assert fills(plain.forward(asked), LARGE).bytes == 4 * (340 * 32 + 2 * 100 * 70)


@pytest.mark.parametrize("task", [64, 128, 512])
def test_the_core_forward_at_its_ends(task: int) -> None:
    asked = single(heads=4, kv_heads=2, queries=512, keys=384)
    once = 4 * (32 * (4 * 512 * 2 + 2 * 384 * 2) + 3 * 4 * 512)
    room = 4 * (task * 64 + 128 * 64)
    assert core_forward(asked, task, LARGE).bytes == once + room
    moved = tiled.forward(asked, visits_of(asked, (task, 128))).bytes
    fits_alone = room + 2 * 128 * 64 * 4
    assert core_forward(asked, task, fits_alone).bytes == moved + room
    again = 4 * (4 * 512 * 3 * 64 + 4 * 512 * 96 + 128 * 64)
    assert core_forward(asked, task, fits_alone - 1).bytes == moved + again


def test_the_core_backward_at_its_ends() -> None:
    asked = single(queries=256, keys=256)
    rows, sums = 4 * 32 * 256, 2 * 4 * 32 * 256
    room = 4 * (2 * 128 * 64 + 64 * (4 * 32 + 32))
    statistics = 4 * 256 * 3
    once = 8 * rows + statistics + sums + room  # q k v out dO dq dk dv
    assert core_backward(asked, LARGE).bytes == once
    least = room + 2 * 128 * 2 * 4 * 32
    tight = core_backward(asked, least).bytes
    # Keys and values three times more, sums five times; dO and delta have left by then, in part.
    assert tight - once >= 3 * 2 * rows + 4 * sums
    assert tight - once <= 3 * 2 * rows + 4 * sums + rows + 4 * 256
    with pytest.raises(InvalidArgument, match="cache_bytes"):
        core_backward(asked, least - 1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_larger_cache_never_fills_more(causal: bool) -> None:
    asked = single(heads=2, queries=300, keys=300, mask=masks.causal().program if causal else ())
    sizes = range(2**15, 2**21, 2**14)
    for made in (
        [core_forward(asked, 128, size).bytes for size in sizes],
        [core_backward(asked, size).bytes for size in sizes if size >= 2**18],
        [fills(plain.forward(asked), size).bytes for size in sizes],
    ):
        assert made == sorted(made, reverse=True)
        assert made[0] > made[-1]


def test_a_mask_leaves_keys_out() -> None:
    asked = single(queries=512, keys=512)
    causal = asked._replace(mask=masks.causal().program)
    for cache in (2**17, LARGE):
        whole, some = (core_forward(each, 64, cache) for each in (asked, causal))
        keys = [next(x.read for x in made.operands if x.name == "k") for made in (whole, some)]
        assert keys[1] == keys[0] if cache == LARGE else keys[1] < 0.7 * keys[0]


def test_what_the_core_does_not_do_so_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="float32 or float64"):
        core_forward(problem(), 64, LARGE)
    with pytest.raises(InvalidArgument, match="one chunk"):
        core_backward(single(keys=1088), LARGE)
    core_backward(single(keys=1087), LARGE)


def test_what_tiles_hold_is_no_room_for_operands() -> None:
    """The rule that cachegrind has judged: an operand stays if it fits beside the tiles."""
    one = Pass("p", (Operand("k", 40, once=10),), sharing=Sharing(1, 4, 10), held=6)
    assert Traffic((one,)).behind(16, 1).bytes == 10
    assert Traffic((one,)).behind(15, 1).bytes == 40
    assert Traffic((one._replace(held=0),)).behind(15, 1).bytes == 10
