"""The account of a plan, and the choice that goes by it."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tests.plan.some_problems import problem
from tilewise.engine import registry
from tilewise.errors import InvalidArgument
from tilewise.plan.choose import Candidate, Choice, choose
from tilewise.plan.traffic.account import Account, Loops, account, cached, cost
from tilewise.variants import masks

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
    found = {name: registry.load(name).loops(case, "sm_90") for name in registry.BACKEND_NAMES}
    assert found["cpu"].order == "keys_outside"
    assert found["gpu"].order == "by_tiles"
    assert found["tiled"].order == "rows_outside"
    made = {name: account(case, loops).backward.ours for name, loops in found.items()}
    assert [one.name for one in made["gpu"].passes] == ["delta", "dq", "dkdv"]
    assert [one.name for one in made["cpu"].passes] == ["delta", "dqkv"]
    assert made["gpu"].flops == made["cpu"].flops * 7 // 5


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
