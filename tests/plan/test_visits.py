"""Which tiles a walk visits: arithmetic against judging each, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.some_problems import problem
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.plan.traffic import tiled, visits_of
from tilewise.problem import Operands
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


def test_sequences_add_up() -> None:
    lengths = [(10, 30), (0, 3), (17, 17)]
    case = problem(3, 2, 1, 27, 50, layout="varlen", mask=masks.causal().program)
    whole = visits_of(case, (8, 8), lengths=lengths)
    each = [visits_of(problem(1, 2, 1, m, n, mask=case.mask), (8, 8)) for m, n in lengths]
    assert whole.pairs == sum(one.pairs for one in each)
    assert whole.keys_walked == sum(one.keys_walked for one in each)


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
