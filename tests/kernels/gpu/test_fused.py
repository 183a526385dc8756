"""The fused backward for Hopper in the emulator: numbers, leaks, and programs that wait in turn."""

from __future__ import annotations

from itertools import count, product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cases import Case, Inputs, build
from tests.contract import assert_same_bits
from tests.kernels.gpu.emulator import EmulatorError, emulate
from tests.kernels.gpu.faults import Fault, with_fault, without
from tests.kernels.gpu.passes import HALVES, NAN, variant
from tests.kernels.gpu.test_hopper import (
    AND,
    CHIP,
    PLAIN,
    SHAPE,
    TILE,
    of_width,
    problem_with,
    rows_met,
    shown_pairs,
    window,
)
from tests.oracle import Outcome, Sent, check_twice, problem_of, send
from tilewise.kernels.gpu import Launch, config, run
from tilewise.kernels.gpu.backward import Upstream, backward_of, fused, groups
from tilewise.kernels.gpu.backward.passes import backward_launches
from tilewise.kernels.gpu.config import UNPROVEN, Config
from tilewise.kernels.gpu.expressions import variant_of
from tilewise.kernels.gpu.walk import tiles
from tilewise.problem import Grads, Needs, Operands, Problem, Result
from tilewise.reference import tiled


def asking(width: int, family: str = "sm_90") -> Config:
    """The configuration of somebody who asks for the fused kernel."""
    return Config(family, overrides=(("fused", UNPROVEN["fused", "sm_90", width]),))


CASES = [*PLAIN, Case("whole", **SHAPE, queries=256, keys=384)]
MASKED = [case for case in CASES if case.mask]


def _name(of: Any) -> str:
    return str(of.name)


class Backward(NamedTuple):
    """The launches of a backward pass, and the gradients that they fill."""

    grads: Grads
    before: list[Launch]
    launch: Launch
    after: Launch

    def run(self, seed: int, slots: int, kernel: Any = None) -> tuple[Tensor, ...]:
        """Run it with so many programs at a time; the gradients of q, k and v."""
        found = self.written()
        for tensor in found:
            tensor.fill_(NAN)
        self.launch.arguments["sum_rows"].base.fill_(NAN)
        self.launch.arguments["turns"].fill_(7)
        run(self.before)
        emulate(self.launch._replace(kernel=kernel or self.launch.kernel), seed, slots)
        run([self.after])
        return found

    def written(self) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v."""
        return tuple([each for each in self.grads[:3] if each is not None])


def _prepared(problem: Problem, operands: Operands, result: Result, sent: Sent) -> Backward:
    q, k, v = (torch.empty_like(each) for each in operands[:3])
    grads = Grads(q, k, v)
    incoming = Upstream(sent.out, sent.lse), Needs(True, True, True)
    own, chip = variant(problem, operands), asking(problem.head_dim)
    call = backward_of(problem, operands, result, *incoming, chip, own)
    *before, launch, after = backward_launches(call, grads)
    assert launch.kernel is groups.keys_in_groups
    assert after.kernel is fused.narrow_kernel
    return Backward(grads, before, launch, after)


def _check(case: Case, draws: int) -> None:
    seeds = count()

    def outcome(inputs: Inputs, sent: Sent) -> Outcome:
        problem, operands = problem_of(inputs.detached())
        result = tiled.forward(problem, operands, "")
        seed = next(seeds)
        sent = sent._replace(entropy=None)
        found = _prepared(problem, operands, result, sent).run(seed, (1, 3, 20)[seed % 3])
        return Outcome(result.out, result.lse, dict(zip("qkv", found, strict=True)))

    check_twice(case, draws, outcome)


SAMPLE = [
    of_width(case, width, HALVES[(index + width // 64) % 2])
    for width in (64, 128)
    for index, case in enumerate(CASES)
    if len(case.mask) <= 1 or width == 64  # joined bands are left to two kernels at D = 128
]


@pytest.mark.parametrize("case", SAMPLE, ids=_name)
def test_all_gradients(case: Case) -> None:
    """dQ, dK and dV by the 2x rule, with one program at a time, three, and all of them."""
    _check(case, 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", SAMPLE, ids=_name)
def test_many_seeds(case: Case, dtype: torch.dtype) -> None:
    _check(case.of(dtype), 10)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["full", "causal", "grouped", "window"])
def test_every_order_gives_the_same_bits(name: str, width: int) -> None:
    case = of_width(next(case for case in CASES if case.name == name), width, torch.float16)
    inputs = build(case)
    problem, operands = problem_of(inputs.detached())
    sent = send(inputs)._replace(entropy=None)
    backward = _prepared(problem, operands, tiled.forward(problem, operands, ""), sent)
    first = [each.clone() for each in backward.run(0, 1)]
    for seed in range(1, 10):
        again = backward.run(seed, (1, 2, 5, 40)[seed % 4])
        for what, one, other in zip("qkv", first, again, strict=True):
            assert_same_bits(one, other, f"d{what}, seed {seed}")


# ---- leaks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MASKED, ids=_name)
def test_keys_hidden_from_a_tile_may_be_nan(case: Case) -> None:
    """In dQ, as in the forward pass: keys that no query of a tile of 128 sees."""
    inputs = build(of_width(case, 64, torch.float16))
    problem, operands = problem_of(inputs.detached())
    sent = send(inputs)._replace(entropy=None)
    result = tiled.forward(problem, operands, "")
    good = _prepared(problem, operands, result, sent).run(0, 3)[0].clone()
    shown = shown_pairs(problem)
    for seed, first in enumerate(range(0, problem.queries, TILE)):
        tile = slice(first, first + TILE)
        hidden = ~shown[tile].any(0)
        k, v = operands.k.clone(), operands.v.clone()
        k[:, :, hidden] = v[:, :, hidden] = NAN
        got = _prepared(problem, operands._replace(k=k, v=v), result, sent).run(seed, 3)[0]
        assert_same_bits(got[:, :, tile], good[:, :, tile], f"dQ from row {first}")


@pytest.mark.parametrize("width", [64, 128])
def test_keys_beyond_the_last_add_nothing(width: int) -> None:
    """Their scores are 0 where all others are far below: exp2 of the difference is infinite."""
    case = of_width(Case("far", **SHAPE, queries=64, keys=72), width, torch.float16)
    inputs = build(case)
    problem, operands = problem_of(inputs.detached())
    operands.q.fill_(4.0)
    operands.k.copy_(operands.k / 8 - 60.0 / width**0.5)
    sent = send(inputs)._replace(entropy=None)
    result = tiled.forward(problem, operands, "")
    assert float(result.lse.max()) < -100
    for found in _prepared(problem, operands, result, sent).run(0, 1):
        assert found.isfinite().all()


# ---- the protocol --------------------------------------------------------------------------------

# Of ``groups.py`` and ``fused.py``.
IN_GROUPS = [
    without("        mbarrier.arrive(ds_full.index(side), count=1)", "dS never announced"),
    Fault("no wait for the dS of the other group",
          "    if FORM.SHARED:\n        mbarrier.wait(ds_full.index(side), (t // 2) & 1)\n",
          "    if FORM.SHARED:\n"),
    Fault("phase of dS", "        mbarrier.wait(ds_full.index(side), (t // 2) & 1)\n        part",
          "        mbarrier.wait(ds_full.index(side), t & 1)\n        part"),
    Fault("dQ used before its wait", "warpgroup_mma_wait(1, deps=[part])",
          "warpgroup_mma_wait(2, deps=[part])"),
    Fault("no fence after dS", "store(ds)\n        fence_async_shared()", "store(ds)"),
    without("        mbarrier.wait(bars[4][3].index(0), 0)", "keys overwritten by their gradient"),
]  # fmt: skip
IN_FUSED = [
    Fault("no ticket", "program = gl.atomic_add(turns, 1, sem=\"relaxed\", scope=\"gpu\")",
          "program = gl.program_id(0)"),
    Fault("no wait for a turn", "while added < before", "while added < 0"),
    Fault("one turn early", "while added < before", "while added < before - 1"),
    Fault("turns never handed on", "turn, ordered(1)", "turn, ordered(0)"),
    Fault("handed on before it is written", "turn, ordered(1)", "turn, 1"),
    Fault("order of the semaphore", "before = n0 // FORM.BN -",
          "before = (N - 1) // FORM.BN - n0 // FORM.BN -"),
    Fault("nobody stores", "if before == 0:", "if before == -1:"),
    Fault("all store", "if before == 0:", "if before >= 0:"),
    Fault("turns of the first head", "(1 + (b * heads + h) * row_tiles", "(1 + h * 0 * row_tiles"),
    Fault("turn of the tile after the next", "turn - 1, 0", "turn - 2, 0"),
    without("            tma.store_wait(0)", "room released before it is read"),
    without("            mbarrier.arrive(dq_empty.index(here), count=1)", "room never released"),
    without("            mbarrier.wait(dq_full.index(here), (t // FORM.ROOMS) & 1)", "dQ missed"),
    without("    mbarrier.wait(dq_empty.index(here), ((t // FORM.ROOMS) & 1) ^ 1)", "dQ lost"),
    Fault("phase of the room", "((t // FORM.ROOMS) & 1) ^ 1", "(t // FORM.ROOMS) & 1"),
    Fault("no fence after dQ", "room.store(part)\n    fence_async_shared()", "room.store(part)"),
    Fault("count of the groups", "GROUPS if FORM.SHARED else 1", "1"),
    Fault("the other half of the columns", "room.slice(c * 64", "room.slice((1 - c) * 64"),
    Fault("keys of one half", "k = k.slice(c * 64", "k = k.slice(0 * 64"),
    Fault("dS of one group", "ds_s.index(t % 2 * GROUPS + g)", "ds_s.index(t % 2 * GROUPS)"),
]  # fmt: skip
# Of ``walk/tiles.py``.
IN_TILES = [
    Fault("tiles that descend", "return tile, first +", "return tiles - 1 - tile, first +"),
    Fault("tiles of other lines", "first + within % here", "first + within // here % here"),
]
SEEDS = range(40)


def _module(fault: Fault, folder: Path) -> ModuleType:
    """A copy of ``groups.py`` that has a fault, or takes from copies of other modules with one."""
    if fault in IN_GROUPS:
        found: ModuleType = with_fault(groups, fault, folder)
        return found
    none = Fault("", "from __future__", "from __future__")
    found = with_fault(groups, none, folder)
    wrong = with_fault(fused, none if fault in IN_TILES else fault, folder)
    if fault in IN_TILES:
        wrong.slot_of = with_fault(tiles, fault, folder).slot_of
    for name in ("add_queries", "by_keys", "leave", "place_in_turn", "rooms_for"):
        setattr(found, name, getattr(wrong, name))
    return found


@pytest.fixture(scope="module")
def backward() -> tuple[Backward, tuple[Tensor, ...]]:
    """Three programs a key head, two items, two query heads for each; and what is right."""
    shape = SHAPE | {"batch": 2, "heads": 2}
    inputs = build(Case("turns", **shape, queries=320, keys=384, dtype=HALVES[0]))
    problem, operands = problem_of(inputs.detached())
    sent = send(inputs)._replace(entropy=None)
    made = _prepared(problem, operands, tiled.forward(problem, operands, ""), sent)
    return made, tuple([each.clone() for each in made.run(0, 1)])


@pytest.mark.parametrize("fault", [*IN_GROUPS, *IN_FUSED, *IN_TILES], ids=_name)
def test_a_fault_is_found(
    fault: Fault, backward: tuple[Backward, tuple[Tensor, ...]], tmp_path: Path
) -> None:
    made, right = backward
    kernel = _module(fault, tmp_path).keys_in_groups

    assert any(_differs(made, right, kernel, seed) for seed in SEEDS)


def _differs(made: Backward, right: tuple[Tensor, ...], kernel: Any, seed: int) -> bool:
    """Whether the emulator or the numbers tell a kernel from the right one."""
    try:
        found = made.run(seed, 1 + seed % 3, kernel)
    except EmulatorError:
        return True
    return not all(map(torch.equal, found, right))


def test_one_side_of_ds_is_too_few(
    backward: tuple[Backward, tuple[Tensor, ...]], tmp_path: Path
) -> None:
    """A group stores dS of the next tile while the other still multiplies by that of this one."""
    stored = Fault("", "memory[4].index(side * GROUPS + c)", "memory[4].index(c)")
    found = with_fault(groups, stored, tmp_path)
    read = Fault("", "ds_s.index(t % 2 * GROUPS + g)", "ds_s.index(g)")
    found.by_keys = with_fault(fused, read, tmp_path).by_keys
    assert any(_differs(*backward, found.keys_in_groups, seed) for seed in SEEDS)


# ---- turns ---------------------------------------------------------------------------------------


def _check_turns(problem: Problem) -> None:
    """Programs that add to a tile of queries are neighbours, from the first key that it sees on."""
    own = variant_of(problem, (), ())
    queries_of, keys_of = CHIP.stand_in(own.queries_of), CHIP.stand_in(own.keys_of)
    sides = problem.queries, problem.keys
    met = [set(rows_met(queries_of, n0, sides, 2, True)) for n0 in range(0, problem.keys, 4)]
    for m0 in range(0, problem.queries, 2):
        adding = [tile for tile, rows in enumerate(met) if m0 in rows]
        seen = rows_met(keys_of, m0, sides, 4, False, of=2)
        first = seen[0] // 4 if seen else 0
        assert adding == list(range(first, first + len(adding))), f"{problem.mask}, {sides}: {m0}"


def test_turns_of_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: tiles of 2 x 4 for 64 x 128, all bands, all sizes."""
    monkeypatch.setattr(config, "_EDGE", 4)
    sides, sizes = (-1, 0, 1, 2, 3, 4, 6, 8, 12), range(1, 11)
    bands = [window(*params) for params in product(sides, sides, (0, 1))]
    served = 0
    for each, M, N in product(bands, sizes, sizes):
        problem = problem_with(each, queries=M, keys=N)
        if asking(128).fused(problem) is not None:
            served += 1
            _check_turns(problem)
    assert served > 1000


def test_turns_of_two_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_EDGE", 4)
    sides, sizes = (-1, 0, 4), (3, 4, 8)
    bands = [window(*params) for params in product(sides, sides, (0, 1))]
    served = 0
    for one, other in product(bands, bands):
        for M, N in product(sizes, sizes):
            problem = problem_with(one, other, AND, queries=M, keys=N, head_dim=64, value_dim=64)
            assert asking(128).fused(problem._replace(head_dim=128, value_dim=128)) is None
            if asking(64).fused(problem) is not None:
                served += 1
                _check_turns(problem)
    assert served > 100
