"""Forward passes in groups of warps that no GPU has run, in the emulator: numbers and protocol.

They are Blackwell's, and that of D = 256 on Hopper.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case, Inputs, build
from tests.contract import assert_same_bits
from tests.kernels.gpu.emulator import emulate
from tests.kernels.gpu.faults import Fault, moved, with_fault, without
from tests.kernels.gpu.passes import HALVES, NAN, prepare_forward
from tests.kernels.gpu.test_hopper import (
    LISTED,
    PLAIN,
    SHAPE,
    Run,
    hidden_from,
    of_width,
    problem_with,
    run_of,
)
from tests.oracle import Outcome, Sent, check_twice, problem_of
from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.config import UNPROVEN, Blocks, Config
from tilewise.kernels.gpu.forward import blackwell, groups
from tilewise.problem import Operands, Problem, Result
from tilewise.reference import tiled
from tilewise.variants.program import Instr

FAMILY = {64: "sm_100", 128: "sm_100", 256: "sm_90"}  # by width
TILES = {width: UNPROVEN["grouped", family, width] for width, family in FAMILY.items()}


def asking(width: int) -> Config:
    """The configuration of somebody who asks for the kernel of a width."""
    return Config(FAMILY[width], overrides=(("grouped", TILES[width]),))


def _prepared(problem: Problem, operands: Operands) -> tuple[Result, Launch]:
    result, launches = prepare_forward(problem, operands, asking(problem.head_dim))
    (launch,) = launches
    assert launch.kernel is groups.attend_in_groups
    assert (problem.head_dim < 256) == launch.constants["FORM"].TENSOR_MEMORY
    return result, launch


def _forward(problem: Problem, operands: Operands, seed: int) -> Result:
    result, launch = _prepared(problem, operands)
    emulate(launch, seed)
    return result


def _check(case: Case, draws: int) -> None:
    seeds = count()

    def outcome(inputs: Inputs, sent: Sent) -> Outcome:
        problem, operands = problem_of(inputs.detached())
        result = _forward(problem, operands, next(seeds))
        expected = tiled.forward(problem, operands, "")
        torch.testing.assert_close(result.stats, expected.stats, rtol=1e-5, atol=1e-5)
        return Outcome(result.out, result.lse, {})

    check_twice(case, draws, outcome)


# Scores of rows that grow by more than 2^8 from tile to tile, so that sums fade on the way.
GROWING = Case("growing", **SHAPE | {"heads": 2}, queries=300, keys=700, scale=1.0)
CASES = [*PLAIN, *LISTED, GROWING]
SAMPLE = [
    of_width(case, width, HALVES[(index + width // 64) % 2])
    for width in TILES
    for index, case in enumerate(CASES if width < 256 else [*PLAIN, *LISTED])
]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_forward(case: Case) -> None:
    """out and lse by the 2x rule; maxima and sums of rows are those of the reference."""
    _check(case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("width", TILES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", [*PLAIN, *LISTED], ids=lambda case: case.name)
def test_many_seeds(case: Case, dtype: torch.dtype, width: int) -> None:
    _check(of_width(case, width, dtype), 10)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("case", [each for each in CASES if each.mask], ids=lambda case: case.name)
def test_keys_hidden_from_a_tile_may_be_nan(case: Case, width: int) -> None:
    problem, operands = problem_of(build(of_width(case, width, torch.float16)).detached())
    good, size = _forward(problem, operands, 0), TILES[width].queries
    for seed, first in enumerate(range(0, problem.queries, size)):
        tile = slice(first, first + size)
        hidden = hidden_from(problem, operands, False, tile, 128)
        k, v = operands.k.clone(), operands.v.clone()
        k[hidden] = v[hidden] = NAN
        got = _forward(problem, operands._replace(k=k, v=v), seed)
        for name in ("out", "lse"):
            one, other = (getattr(result, name)[:, :, tile] for result in (got, good))
            assert_same_bits(one, other, f"{name} from row {first}")


# ---- the protocol --------------------------------------------------------------------------------

FAULTS = [
    without("    mbarrier.wait(k_full.index(0), 0)", "no wait for first keys"),
    without("        mbarrier.wait(q_full.index(c), 0)", "no wait for queries"),
    without(
        "        mbarrier.wait(v_full.index(here), (j // FORM.STAGES) & 1)", "no wait for values"
    ),
    without(
        "        mbarrier.wait(k_full.index(after), ((j + 1) // FORM.STAGES) & 1)",
        "no wait for keys",
    ),
    without(
        "    mbarrier.wait(v_full.index(here), (last // FORM.STAGES) & 1)",
        "no wait for last values",
    ),
    without("            mbarrier.wait(weighed.index(c), j & 1)", "no wait for probabilities"),
    without("        mbarrier.wait(weighed.index(c), last & 1)", "no wait for the last of them"),
    without("    mbarrier.wait(scored.index(c), j & 1)", "no wait for scores"),
    without("    mbarrier.wait(turns[2].index(c), 0)", "no wait for sums"),
    without("        tcgen05_commit(v_empty.index(here))", "values never released"),
    without("        tcgen05_commit(k_empty.index(after))", "keys never released"),
    moved(
        "        tcgen05_commit(v_empty.index(here))",
        "        for c in gl.static_range(GROUPS):\n"
        "            mbarrier.wait(weighed.index(c), j & 1)\n"
        "            _sum(c, j, memory, sums, FORM)\n"
        "            _score(c, after, memory, sums[0], FORM)\n"
        "            tcgen05_commit(scored.index(c))",
        "values released early",
    ),
    moved(
        "            _score(c, after, memory, sums[0], FORM)",
        "            _sum(c, j, memory, sums, FORM)",
        "scores before the sums that read probabilities",
    ),
    moved(
        "            tcgen05_commit(scored.index(c))",
        "            _score(c, after, memory, sums[0], FORM)",
        "scores told of too early",
    ),
    moved(
        "    mbarrier.arrive(weighed.index(c), count=1)",
        "    sums[1].index(c).slice(0, FORM.BN).store(p.to(KIND))",
        "probabilities told of too early",
    ),
    Fault("phase of the keys", "k_full.index(after), ((j + 1)", "k_full.index(after), ((j)"),
    Fault("sums never begun", "use_acc=j > 0", "use_acc=j >= 0"),
    Fault("sums begun anew", "use_acc=j > 0", "use_acc=j > 1"),
    Fault("sums do not fade", "        _fade(sums[2].index(c), fade, FORM)\n", ""),
    Fault("all columns but some", "range(FORM.D // _PIECE)", "range(FORM.D // _PIECE - 1)"),
    without("    fence_async_shared()", "no fence"),
    without("    tma.store_wait(0)", "no wait for the store"),
]
SEEDS = range(40)
# Enough tiles to go around a ring several times, and sums that fade.
RING = Case("ring", **SHAPE, queries=256, keys=1024, dtype=torch.float16, scale=2.0)


@pytest.fixture(scope="module")
def run() -> Run:
    problem, operands = problem_of(build(RING).detached())
    result, launch = _prepared(problem, operands)
    return run_of((result.out, result.lse, result.stats), launch)


def _with_parts(parts: Any, folder: Path) -> Any:
    """The kernel with other parts for Blackwell."""
    found = with_fault(groups, Fault("", "from __future__", "from __future__"), folder)
    found.blackwell = parts
    return found.attend_in_groups


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault, run: Run, tmp_path: Path) -> None:
    kernel = _with_parts(with_fault(blackwell, fault, tmp_path), tmp_path)
    assert any(run.differs(kernel, seed) for seed in SEEDS)


def test_every_order_gives_the_same_bits(run: Run) -> None:
    assert not any(run.differs(run.launch.kernel, seed) for seed in SEEDS)


def test_rows_keep_their_bits_beside_rows_that_grow() -> None:
    """A row's base moves for that row alone."""
    problem, operands = problem_of(build(RING).detached())
    quiet = _forward(problem, operands, 0)
    q = operands.q.clone()
    q[:, :, 1::2] *= 30
    got = _forward(problem, operands._replace(q=q), 1)
    assert_same_bits(got.out[:, :, ::2], quiet.out[:, :, ::2], "out of the other rows")


# ---- which calls are served ----------------------------------------------------------------------


def test_only_who_asks_is_served() -> None:
    """No GPU has run it. Where it is asked for, it serves what Hopper's serves."""
    for width, family in FAMILY.items():
        problem = problem_with(head_dim=width, value_dim=width)
        assert Config(family).in_groups("forward", problem) is None
        assert asking(width).in_groups("forward", problem) == TILES[width]
        assert asking(width).in_groups("dkdv", problem) is None
        blocks = Config(family, overrides=(("forward", Blocks(128, 128, 8, 2)),))
        assert blocks.in_groups("forward", problem) is None
    capped = problem_with(score=(Instr("softcap", (20.0,)),))
    assert asking(128).in_groups("forward", capped) is None
    assert asking(128).in_groups("forward", problem_with(dtype=torch.float32)) is None
