"""Which tiles a walk visits: arithmetic against judging each, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.some_problems import problem
from tilewise.chips import CHIPS
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.plan.traffic import Operand, Pass, Traffic, tiled, visits_of
from tilewise.plan.traffic.count import Sharing, balance, merged, predict
from tilewise.plan.traffic.memory import fit, plain_held, tiled_held
from tilewise.problem import Operands, Problem
from tilewise.variants import masks
from tilewise.variants.program import Instr

SIDES = st.one_of(st.none(), st.integers(0, 70))


@given(
    queries=st.integers(1, 90),
    keys=st.integers(1, 90),
    tile=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    left=SIDES,
    right=SIDES,
    align=st.sampled_from(("bottom_right", "top_left")),
    prefix=st.none() | st.integers(0, 100),
)
@settings(max_examples=80)
def test_runs_are_what_judging_finds(
    queries: int, keys: int, tile: Any, left: Any, right: Any, align: Any, prefix: Any
) -> None:
    mask = masks.window(left, right, align=align)
    if prefix is not None:
        mask = mask & masks.prefix(prefix)
    case = problem(2, 2, 1, queries, keys, mask=mask.program)
    # Negated twice it is the same mask, but not one that arithmetic knows.
    twice = (*mask.program, Instr("not"), Instr("not"))
    judged = visits_of(case._replace(mask=twice), tile) if mask.program else visits_of(case, tile)
    assert visits_of(case, tile) == judged


def test_sums_without_a_mask() -> None:
    found = visits_of(problem(3, 4, 2, 100, 70), (32, 16))
    assert (found.rows, found.keys, found.all_pairs) == (1200, 420, 84000)
    assert (found.row_tiles, found.key_tiles, found.tiles) == (48, 60, 12 * 20)
    assert (found.pairs, found.density) == (84000, 1.0)
    assert (found.rows_walked, found.keys_walked) == (12 * 5 * 100, 12 * 4 * 70)
    assert found.rows_seen == 1200


def test_nothing_to_visit() -> None:
    for sizes in ((0, 2, 2, 5, 5), (2, 2, 2, 0, 5), (2, 2, 2, 5, 0)):
        found = visits_of(problem(*sizes, mask=masks.causal().program), (4, 4))
        assert (found.tiles, found.pairs, found.density) == (0, 0, 1.0)


def test_batch_items_with_masks_of_their_own() -> None:
    """Item 0 sees 10 keys and item 1 all of them; the reference judges both at once."""
    case = problem(2, 3, 1, 40, 64, mask=masks.lengths(torch.tensor([1, 2])).program)
    nothing = torch.empty(2, 1, 1, 1)
    operands = Operands(nothing, nothing, nothing, (torch.tensor([10, 64]),))
    apart = visits_of(case, (40, 16), operands)
    assert apart.pairs == 3 * 40 * (16 + 64)
    assert visits_of(case, (40, 16), operands, together=True).pairs == 3 * 40 * (64 + 64)


def test_what_makes_no_sense_is_refused() -> None:
    case = problem()
    with pytest.raises(InvalidArgument, match=r"key_tile.*at least 1"):
        visits_of(case, (8, 0))
    captured = masks.dense(torch.ones(4, 4, dtype=torch.bool)).program
    with pytest.raises(InvalidArgument, match="operands"):
        visits_of(problem(mask=captured), (8, 8))
    with pytest.raises(InvalidArgument, match=r"lengths.*Give lengths"):
        visits_of(problem(layout="varlen"), (8, 8))
    with pytest.raises(InvalidArgument, match="add up to 64 queries"):
        visits_of(problem(layout="varlen"), (8, 8), lengths=[(3, 4), (5, 6)])


def test_too_many_tiles_to_judge_are_refused() -> None:
    size = 300
    case = problem(1, 1, 1, size, size, mask=masks.dense(torch.ones(1, 1).bool()).program)
    nothing = torch.empty(1, 1, 1, 1)
    operands = Operands(nothing, nothing, nothing, (torch.ones(1, 1, 1, 1, dtype=torch.bool),))
    with pytest.raises(Unsupported, match="BlockMask"):
        visits_of(case, (1, 1), operands)


def test_parts_are_whole_tiles() -> None:
    case = problem()
    with pytest.raises(InvalidArgument, match="multiple of the tile's 16"):
        tiled.forward_in_parts(case, visits_of(case, (8, 16)), 24)
    with pytest.raises(InvalidArgument, match="delta"):
        tiled.backward_keys_outside(case, visits_of(case, (8, 16)), None, "never")


# ---- From counts to seconds on chips and to bytes that are held, and what a cache takes away.


H100 = CHIPS["h100"]


def one(byte_count: float, flops: float, powers: float) -> Pass:
    return Pass("one", (Operand("x", int(byte_count)),), int(flops), int(powers))


@pytest.mark.parametrize(
    ("made", "bound"),
    [
        (one(3.35e12, 1e12, 1e9), "memory"),
        (one(1e9, 989.4e12, 1e9), "matrix"),
        (one(1e9, 1e12, 3.86496e12), "exponential"),
    ],
)
def test_the_longest_bounds(made: Pass, bound: str) -> None:
    seconds = predict(Traffic((made,)), H100, "bfloat16")
    assert seconds.bound == bound
    assert seconds.total == pytest.approx(1.0)


def test_passes_follow_one_another() -> None:
    """Three seconds, though the sum of no ceiling is as much."""
    passes = (one(3.35e12, 0, 0), one(0, 2 * 989.4e12, 0))
    seconds = predict(Traffic(passes), H100, "bfloat16")
    assert seconds.total == pytest.approx(3.0)
    assert seconds.memory == pytest.approx(1.0)
    assert seconds.matrix == pytest.approx(2.0)
    assert seconds.bound == "matrix"


def test_a_missing_figure_is_named() -> None:
    traffic = Traffic((one(1, 1, 1),))
    with pytest.raises(InvalidArgument, match="peak in bfloat16"):
        predict(traffic, CHIPS["t4"], "bfloat16")
    unmeasured = replace(CHIPS["graviton3"], exponentials_s=None)
    with pytest.raises(InvalidArgument, match=r"rate of exponentials.*doctor --peak"):
        predict(traffic, unmeasured, "float32")


def test_the_ridge() -> None:
    assert balance(H100, "bfloat16") == pytest.approx(989.4e12 / 3.35e12)


def test_a_cache_that_holds_all_heads_in_flight_lets_each_byte_through_once() -> None:
    case = problem(8, 4, 2, 1024, 1024)
    visited = visits_of(case, (128, 64))
    traffic = tiled.forward(case, visited)
    k = next(each for each in traffic.operands if each.name == "k")
    assert k.read == 8 * 4 * 8 * 1024 * 32 * 2
    through = {each.name: each for each in traffic.behind(2**20, 16).operands}
    assert through["k"].read == 8 * 2 * 1024 * 32 * 2
    assert traffic.behind(None, 16) == traffic


def test_without_room_programs_share_what_they_walk_over_in_step() -> None:
    """16 tiles of queries a key head, 4 at a time: four rounds over the keys."""
    case = problem(1, 4, 2, 1024, 1024)
    traffic = tiled.forward(case, visits_of(case, (128, 64)))
    through = {each.name: each for each in traffic.behind(1024, 4).operands}
    assert through["k"].read == 4 * 2 * 1024 * 32 * 2
    alone = {each.name: each for each in traffic.behind(1024, 1).operands}
    assert alone["k"].read == 16 * 2 * 1024 * 32 * 2
    assert alone["q"].read == through["q"].read == 4 * 1024 * 32 * 2


def test_writes_go_through() -> None:
    made = Pass("x", (Operand("a", 100, 7, once=10),), sharing=Sharing(1, 10, 10))
    assert Traffic((made,)).behind(10, 2).bytes == 17


def test_merging_keeps_names_and_sums() -> None:
    found = merged([Operand("a", 5, 1, once=2), Operand("b", 1), Operand("a", 5), Operand("c")])
    assert found == (Operand("a", 10, 1, once=7), Operand("b", 1, once=1))


def test_an_intensity_of_nothing_is_nothing() -> None:
    assert Traffic(()).intensity == 0.0
    assert Traffic((one(10, 30, 0),)).intensity == 3.0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("what", ["batch", "length"])
@pytest.mark.parametrize("layers", [1, 12])
def test_the_largest_fits_and_the_next_does_not(training: bool, what: str, layers: int) -> None:
    room, case = 10**8, problem(kv_heads=2, dropout_p=0.1)
    found = fit(case, room, what, layers, training)
    assert found.plain < found.tiled

    def sized(size: int) -> Problem:
        if what == "batch":
            return case._replace(batch=size)
        return case._replace(queries=size, keys=size)

    for held, size in ((plain_held, found.plain), (tiled_held, found.tiled)):
        assert held(sized(size), training).peak(layers) <= room
        assert held(sized(size + 1), training).peak(layers) > room


def test_ours_grows_with_the_length_and_plain_with_its_square() -> None:
    small, large = problem(queries=1024, keys=1024), problem(queries=2048, keys=2048)
    assert tiled_held(large).peak() == 2 * tiled_held(small).peak()
    assert plain_held(large).peak() > 3.5 * plain_held(small).peak()


def test_the_softmax_holds_two_matrices() -> None:
    case = problem()
    matrix, operand = 2 * 4 * 64 * 64 * 2, 2 * 4 * 64 * 32 * 2
    assert plain_held(case, training=False).peak() == 4 * operand + 2 * matrix
    assert plain_held(case).kept == 4 * operand + matrix
    with_dropout = plain_held(case._replace(dropout_p=0.1))
    assert with_dropout.kept == 4 * operand + 2 * matrix + matrix // 2


def test_eight_bits() -> None:
    """Ours reads a byte a number and gives two; plain attention has copies in sixteen bits."""
    case = problem(kv_heads=2, dtype=torch.float8_e4m3fn)
    number, rows = 2 * 4 * 64 * 32, 3 * 2 * 4 * 64 * 4
    assert tiled_held(case, training=False).peak() == 2 * number + 2 * number + rows
    wide = plain_held(case._replace(dtype=torch.bfloat16), training=False)
    assert plain_held(case, training=False).peak() == wide.peak() + 2 * number


def test_nothing_fits_into_next_to_nothing() -> None:
    assert fit(problem(), 10, "batch") == (0, 0)


def test_room_and_ceilings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="fit"):
        fit(problem(), 0, "batch")
    with pytest.raises(InvalidArgument, match="what"):
        fit(problem(), 100, "width")
    with pytest.raises(InvalidArgument, match="dense"):
        plain_held(problem(layout="varlen"))
