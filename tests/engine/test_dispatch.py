"""The choice of a backend, its warnings and refusals, and the plan cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tilewise
from tests.engine.samples import qkv
from tilewise import masks
from tilewise.engine import dispatch
from tilewise.engine.dispatch import PLANS, Cache
from tilewise.errors import SlowPathWarning, Unsupported
from tilewise.kernels import Backend, Prepared
from tilewise.plan import Candidate, Plan, Tiles, choose
from tilewise.problem import Grads, Operands, Problem, Result, Statistics


class Pretend(Backend):
    """A backend that says what it is told to say."""

    name: ClassVar[str] = "cpu"

    def __init__(self, absent: str | None = None, reasons: tuple[str, ...] = ()) -> None:
        self.absent, self.reasons = absent, list(reasons)

    def absence(self) -> str | None:
        return self.absent

    def why_not(self, problem: Problem) -> list[str]:
        return self.reasons

    def tiles(self, problem: Problem) -> Tiles:
        return Tiles(16, 32, 3)

    def prepare(self, problem: Problem) -> Prepared:
        def forward(operands: Operands, statistics: Statistics = "") -> Result:
            rows = operands.q.shape[:-1]
            out = torch.zeros(*rows, problem.value_dim)
            return Result(out, torch.zeros(rows), torch.zeros(2, *rows))

        def backward(*_: Any) -> Grads:
            raise AssertionError("not asked for")

        return Prepared(forward, backward)


Swap = Callable[[Pretend], None]


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Swap]:
    """Puts another backend in the place of the compiled one."""
    load = dispatch.load

    def put(backend: Pretend) -> None:
        monkeypatch.setattr(dispatch, "load", lambda name: backend if name == "cpu" else load(name))
        dispatch.warn_slow.cache_clear()
        PLANS.clear()

    yield put
    PLANS.clear()


def test_the_first_that_can_is_chosen(swap: Swap) -> None:
    swap(Pretend())
    plan = tilewise.plan(*qkv())
    assert (plan.backend, plan.tiles, plan.reasons) == ("cpu", Tiles(16, 32, 3), ())


def test_an_absent_core_gives_way_to_the_reference_and_warns_once(swap: Swap) -> None:
    swap(Pretend(absent="the core is not built"))
    with pytest.warns(SlowPathWarning, match="slow reference(.|\n)*the core is not built"):
        out = tilewise.attention(*qkv())
    assert out.shape == (2, 4, 5, 6)
    plan = tilewise.plan(*qkv(dtype=torch.float64))  # a second warning would be an error
    assert plan.backend == "tiled"
    assert plan.reasons == (("cpu", ("the core is not built",)),)


def test_a_backend_that_declines_is_not_replaced(swap: Swap) -> None:
    swap(Pretend(reasons=("D is too wide", "and odd")))
    with pytest.raises(Unsupported) as caught:
        tilewise.attention(*qkv())
    text = str(caught.value)
    assert "backend 'cpu': D is too wide\n  backend 'cpu': and odd" in text
    assert "backend='tiled'" in text
    assert tilewise.attention(*qkv(), backend="tiled").shape == (2, 4, 5, 6)


@pytest.mark.parametrize("broken", [Pretend("not built"), Pretend(None, ("too wide",))])
def test_a_named_backend_never_falls_back(swap: Swap, broken: Pretend) -> None:
    swap(broken)
    with pytest.raises(Unsupported, match=r"backend 'cpu', asked for, cannot run"):
        tilewise.attention(*qkv(), backend="cpu")


CHOICES = [
    ([Candidate("a", ()), Candidate("b", ())], "a", False),
    ([Candidate("a", ("no",)), Candidate("b", ())], "b", False),
    ([Candidate("a", ("no",)), Candidate("r", (), last_resort=True)], None, False),
    ([Candidate("a", ("no",), absent=True), Candidate("r", (), last_resort=True)], "r", True),
    ([Candidate("r", (), last_resort=True), Candidate("a", ())], "a", False),
    ([], None, False),
]


@pytest.mark.parametrize(("candidates", "name", "slow"), CHOICES)
def test_choose(candidates: list[Candidate], name: str | None, slow: bool) -> None:
    assert choose(candidates) == (name, slow)


def test_explain_says_why_for_every_other_backend(
    swap: Swap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))  # no ceilings are kept there
    swap(Pretend())
    explanation = tilewise.explain(*qkv(), mask=masks.causal())
    assert explanation.plan is not None
    assert [name for name, _ in explanation.reasons] == ["tiled"]
    lines = str(explanation).splitlines()
    assert lines[:8] == [
        "backend   cpu",
        "tiles     16 query rows x 32 keys, 3 splits",
        "problem   dense, float32 on cpu, batch 2, heads 4, kv_heads 2, queries 5, keys 7, "
        "head_dim 8, value_dim 6",
        "mask      causal",
        "score     unchanged",
        "scale     0.353553",
        "dropout   0",
        "sinks     no",
    ]
    said = [line.split()[0] for line in lines[8:-2]]
    assert [name for name in ("chip", "forward", "backward", "memory") if name in said] == said
    assert lines[-2:] == ["not tiled:", "  it could, but 'cpu' comes first"]


def test_explain_of_what_nothing_does(swap: Swap) -> None:
    swap(Pretend(reasons=("too wide",)))
    explanation = tilewise.explain(*qkv())
    assert explanation.plan is None
    assert "nothing here can do this call\nnot cpu:\n  too wide\nnot tiled:" in str(explanation)


def test_explain_of_a_named_backend() -> None:
    explanation = tilewise.explain(*qkv(), backend="tiled")
    assert "not cpu:" in str(explanation)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems that are planned from nothing."""
    seen: list[Problem] = []
    from tilewise.engine import call

    plan_problem = dispatch.plan_problem

    def counting(problem: Problem, backend: str | None) -> Plan:
        seen.append(problem)
        return plan_problem(problem, backend)

    monkeypatch.setattr(call, "plan_problem", counting)
    PLANS.clear()
    yield seen
    PLANS.clear()


def test_what_shares_a_plan_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as seen:
        for swapped in (False, True):  # strides are not part of a plan
            for _ in range(2):
                tilewise.attention(*qkv(swapped=swapped), backend="tiled")
        assert len(seen) == 1
        for fresh in (masks.window(2, 0), masks.window(2, 0)):  # programs are values
            tilewise.attention(*qkv(), mask=fresh, backend="tiled")
        assert len(seen) == 2
        for lengths in ([3, 7], [0, 1]):  # captured tensors are not part of it
            mask = masks.lengths(torch.tensor(lengths))
            tilewise.attention(*qkv(), mask=mask, backend="tiled")
        assert len(seen) == 3
        tilewise.attention(*qkv(), scale=0.5, backend="tiled")
        tilewise.attention(*qkv(), dropout_p=0.5, backend="tiled")
        tilewise.attention(*qkv(), sinks=torch.zeros(4), backend="tiled")
        tilewise.attention(*qkv(dtype=torch.bfloat16), backend="tiled")
        q, k, v = qkv()
        tilewise.attention(q[:, :, :3], k, v, backend="tiled")
        assert len(seen) == 8


def _plan() -> Plan:
    return tilewise.plan(*qkv(), backend="tiled")


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    cache: Cache[Plan] = Cache(size=4)
    plan = _plan()
    cache.add("kept", plan)
    for number in range(50):
        cache.add(number, plan)
        assert cache.find("kept") is plan
        assert len(cache) <= 8
    assert cache.find(0) is None
    assert cache.find(49) is plan
    cache.clear()
    assert len(cache) == 0


def test_the_cache_survives_threads() -> None:
    cache: Cache[Plan] = Cache(size=3)
    plan, barrier = _plan(), threading.Barrier(4)

    def work(offset: int) -> None:
        barrier.wait(30)
        for number in range(300):
            cache.add((offset + number) % 11, plan)
            cache.find(number % 7)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(cache) <= 6


def test_each_backend_is_loaded_once() -> None:
    for name in dispatch.BACKEND_NAMES:
        assert dispatch.load(name) is dispatch.load(name)
        assert dispatch.load(name).name == name
