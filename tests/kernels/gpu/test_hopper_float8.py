"""float8 in groups of warps for Hopper: numbers, leaks, protocol, registers, and who takes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.contract import assert_same_bits
from tests.kernels.gpu.emulator import emulate
from tests.kernels.gpu.faults import Fault, with_fault, without
from tests.kernels.gpu.passes import prepare_forward
from tests.kernels.gpu.test_fp8 import KINDS, _call, _check_result
from tests.kernels.gpu.test_hopper import (
    CAP,
    CAUSAL,
    FORWARD_CASE,
    FORWARD_FAULTS,
    LISTED,
    MASKED,
    NOT_SERVED,
    PLAIN,
    SEEDS,
    SERVED,
    TILE,
    Run,
    hidden_from,
    of_width,
    problem_with,
    run_of,
)
from tilewise.kernels.gpu import Launch, run
from tilewise.kernels.gpu.config import FAMILIES, UNPROVEN, Blocks, Config
from tilewise.kernels.gpu.forward import groups
from tilewise.problem import Operands, Problem, Result, Statistics
from tilewise.variants.float8 import FLOAT8

WIDTHS = (64, 128)
SHAPE: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 200, "keys": 200}
CASES = PLAIN + LISTED


def asking(width: int, family: str = "sm_90") -> Config:
    """The configuration of somebody who asks for the kernel."""
    return Config(family, overrides=(("grouped8", UNPROVEN["grouped8", "sm_90", width]),))


def _prepared(
    problem: Problem, operands: Operands, statistics: Statistics = ""
) -> tuple[Result, Launch, list[Launch]]:
    """The result, the kernel, and what comes after it; the values before it are transposed.

    What is behind the last value is NaN.
    """
    config = asking(problem.head_dim)
    result, (before, launch, *after) = prepare_forward(problem, operands, config, statistics)
    assert before.kernel.__name__ == "transpose_kernel"
    assert launch.kernel is groups.attend_in_groups
    before.arguments["transposed"].fill_(0x7F)
    run([before])
    return result, launch, after


def _forward(problem: Problem, operands: Operands, seed: int) -> Result:
    result, launch, _ = _prepared(problem, operands)
    emulate(launch, seed)
    return result


def _check(case: Case, kind: str, seed: int) -> None:
    problem, operands = _call(case, kind)
    got = _forward(problem, operands, seed)
    assert got.out.dtype is torch.bfloat16
    _check_result(got, problem, operands, ("out", "lse"))


SAMPLE = [
    pytest.param(of_width(case, width, FLOAT8), KINDS[(i + width // 64) % len(KINDS)],
                 id=f"{case.name}-{width}")
    for width in WIDTHS
    for i, case in enumerate(CASES)
]  # fmt: skip


@pytest.mark.parametrize(("case", "kind"), SAMPLE)
def test_the_2x_rule(case: Case, kind: str) -> None:
    """out and lse by the rule of float8, with scales of every shape, negative ones too."""
    _check(case, kind, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), SAMPLE)
def test_many_seeds(case: Case, kind: str) -> None:
    for seed in range(10):
        _check(case, kind, seed)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_triton_kernel_gives_the_same(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same tiles, whose order is the same without a mask: other sums round few numbers."""
    short = FAMILIES["interpreter"]._replace(fp8="short")
    monkeypatch.setitem(FAMILIES, "interpreter", short)
    case = of_width(Case("both", **SHAPE | {"keys": 384}, sinks=True), width, FLOAT8)
    problem, operands = _call(case, "items")
    one = _forward(problem, operands, 1)
    config = Config("interpreter", overrides=(("forward", Blocks(128, 128, 4, 1)),))
    other, launches = prepare_forward(problem, operands, config)
    assert launches[-1].kernel.__name__ == "attend"
    run(launches)
    torch.testing.assert_close(one.lse, other.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one.stats, other.stats, rtol=1e-5, atol=1e-6)
    unequal = one.out != other.out
    assert unequal.float().mean() < 0.02
    torch.testing.assert_close(one.out, other.out, rtol=2**-7, atol=2**-9)


def test_statistics_change_no_bit() -> None:
    case = of_width(Case("statistics", **SHAPE, mask=("causal",)), 64, FLOAT8)
    problem, operands = _call(case, "heads")
    bare = _forward(problem, operands, 0)
    result, launch, after = _prepared(problem, operands, "top1")
    assert [each.kernel.__name__ for each in after] == ["describe"]
    emulate(launch, 3)
    assert_same_bits(result.out, bare.out, "out")
    assert_same_bits(result.lse, bare.lse, "lse")


# ---- leaks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MASKED, ids=lambda case: str(case.name))
def test_keys_hidden_from_a_tile_may_be_nan(case: Case) -> None:
    problem, operands = _call(of_width(case, 64, FLOAT8), "items")
    good = _forward(problem, operands, 0)
    for seed, first in enumerate(range(0, problem.queries, TILE)):
        tile = slice(first, first + TILE)
        hidden = hidden_from(problem, operands, False, tile, 128)
        k, v = operands.k.clone(), operands.v.clone()
        k.view(torch.uint8)[hidden] = v.view(torch.uint8)[hidden] = 0x7F
        got = _forward(problem, operands._replace(k=k, v=v), seed)
        for name in ("out", "lse"):
            one, other = (getattr(result, name)[:, :, tile] for result in (got, good))
            assert_same_bits(one, other, f"{name} from row {first}")


# ---- the protocol --------------------------------------------------------------------------------

OWN_FAULTS = [
    Fault("keys in their old places", ".permute((0, 1, 3, 2, 4))", ".permute((0, 1, 2, 3, 4))"
          ".reshape([FORM.BM // GROUPS, FORM.BN // 16, 4, 2, 2])"),
    Fault("bytes of a word exchanged", "[first, second, third, fourth]",
          "[first, third, second, fourth]"),
    Fault("values of the first keys", "(n0 * 0, n0) if", "(n0 * 0, n0 * 0) if"),
    Fault("earlier tiles do not fade", "out * kept[1][:, None] + sums", "out + sums"),
    Fault("tiles before are lost", "out * kept[1][:, None] + sums", "sums"),
    Fault("a row sum that stays raised", "total * LOWERED", "total * 1.0"),
    Fault("an output that stays raised", "weight * LOWERED", "weight * 1.0"),
    Fault("no fence after the sign", "        q.store(signed)\n        fence_async_shared()",
          "        q.store(signed)"),
    without("        q.store(signed)", "a sign that is lost"),
    Fault("the scale of another head", "v_scale + key_line", "v_scale + line"),
]  # fmt: skip


@pytest.fixture(scope="module")
def ring() -> Run:
    """Enough tiles to go around a ring of four places twice, with scales, the first negative."""
    case = replace(of_width(FORWARD_CASE, 64, FLOAT8), heads=2, kv_heads=1)
    problem, operands = _call(case, "items")
    assert operands.q_scale is not None
    operands.q_scale[:] = torch.tensor([-0.5, 0.7])
    result, launch, _ = _prepared(problem, operands)
    return run_of((result.out, result.lse, result.stats), launch)


@pytest.mark.parametrize("fault", [*FORWARD_FAULTS, *OWN_FAULTS], ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault, ring: Run, tmp_path: Path) -> None:
    kernel = with_fault(groups, fault, tmp_path).attend_in_groups
    assert any(ring.differs(kernel, seed) for seed in SEEDS)


def test_every_order_gives_the_same_bits(ring: Run) -> None:
    assert not any(ring.differs(ring.launch.kernel, seed) for seed in range(10))


# ---- registers -----------------------------------------------------------------------------------

_WORD = re.compile(
    r"cvt\S+ low, (%\w+), (%\w+); cvt\S+ high, (%\w+), (%\w+); mov.b32 (%\w+), \{low, high\}"
)
_PRODUCT = re.compile(r"wgmma\.mma_async\S+ \{(.*?)\}, (\{.*?\}|%\w+),")
_OTHER = re.compile(r"\s*(?:mov|ex2|fma|mul|sub|add|selp|neg)\.\S+\s+(%\w+), (.*);")


def _accumulators(ptx: str) -> list[tuple[int, int, int, set[int]]]:
    """(product, register, byte, accumulators) of left operands in registers.

    The accumulators are those of a product of queries and keys that the byte is made of, in the
    order in which the instruction names them.
    """
    words: dict[str, tuple[str, ...]] = {}
    scores: dict[str, int] = {}
    made: dict[str, list[list[str]]] = defaultdict(list)
    products = []
    for line in ptx.splitlines():
        if found := _WORD.search(line):
            second, first, fourth, third, name = found.groups()
            words[name] = (first, second, third, fourth)
        elif found := _PRODUCT.search(line):
            if found[2].startswith("{"):
                products.append(found[2][1:-1].split(","))
            else:
                scores.update({name: at for at, name in enumerate(found[1].split(","))})
        elif found := _OTHER.match(line):
            made[found[1]].append(re.findall(r"%\w+", found[2]))

    def origins(name: str, known: Collection[str]) -> set[str]:
        seen, left, reached = set(), [name], set()
        while left:
            each = left.pop()
            if each in known:
                reached.add(each)
            elif each not in seen:
                seen.add(each)
                left += [source for sources in made[each] for source in sources]
        return reached

    return [
        (number, register, byte, {scores[each] for each in origins(source, scores)})
        for number, operand in enumerate(products)
        for register, name in enumerate(operand)
        for word in origins(name, words)
        for byte, source in enumerate(words[word])
    ]


_PTX = """
import sys, triton
from tilelab.gate import cases, compiling, record
target = record.target_named("sm_90a")
case, = [each for each in cases.CASES if each.name == sys.argv[1]]
launch = case.launches("sm_90")[-1]
source, options = compiling.signature(launch, target)
print(triton.compile(source, target=compiling._gpu(target), options=options).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_probabilities_are_where_the_matrix_units_take_them(width: int) -> None:
    """The emulator knows no registers. PTX says which accumulator is which byte of an operand.

    Thread i of four holds columns 8 g + 2 i and 8 g + 2 i + 1 of an accumulator, and of an operand
    of 8 bits four keys from 4 i on of 16: of 32 keys that a product takes, registers 0 and 1 have
    the first 16, 2 and 3 the others. An odd one has the rows 8 further on.
    """
    command = [sys.executable, "-c", _PTX, f"grouped8 D{width} causal fp8"]
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=compiling)
    found = _accumulators(done.stdout)
    assert len(found) >= 4 * 4 * 4
    for product, register, byte, of in found:
        group = 2 * (2 * (product % (TILE // 32)) + register // 2) + byte // 2
        assert of == {4 * group + 2 * (register % 2) + byte % 2}, (product, register, byte)


# ---- who takes it --------------------------------------------------------------------------------


def eight(problem: Problem) -> Problem:
    return problem._replace(dtype=FLOAT8)


@pytest.mark.parametrize("name", SERVED)
def test_served_where_it_is_asked_for(name: str) -> None:
    problem = eight(SERVED[name])
    assert Config("sm_90").in_groups("forward", problem) is None
    assert asking(128).in_groups("forward", problem) == UNPROVEN["grouped8", "sm_90", 128]
    assert asking(128).in_groups("dkdv", problem) is None


@pytest.mark.parametrize(
    "name", sorted(NOT_SERVED.keys() - {"float8 that is not asked for", "float32"})
)
def test_not_served(name: str) -> None:
    assert asking(128).in_groups("forward", eight(NOT_SERVED[name])) is None


def test_what_else_decides() -> None:
    """The score, the width, the chip, and blocks of the Triton kernel that somebody asks for."""
    one = eight(problem_with(CAUSAL))
    assert asking(128).in_groups("forward", one._replace(score=(CAP,))) is None
    assert asking(128).in_groups("forward", one._replace(head_dim=256, value_dim=256)) is None
    assert asking(128, "sm_89").in_groups("forward", one) is None
    both = asking(128)._replace(
        overrides=(*asking(128).overrides, ("forward", Blocks(64, 64, 4, 2)))
    )
    assert both.in_groups("forward", one) is None
    assert asking(128).in_groups("forward", problem_with(CAUSAL)) == Blocks(128, 128, 8, 2)
