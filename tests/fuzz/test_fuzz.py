"""The fuzzer itself: it finds what is wrong, says it with a seed, and makes it small."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import tilewise
from tests.fuzz import build as building
from tests.fuzz import check as checking
from tests.fuzz.build import build, run
from tests.fuzz.case import Case, Layout, Node, Table, reread
from tests.fuzz.check import FaultError, check
from tests.fuzz.draw import draw
from tests.fuzz.memory import Guarded, Heap, lay
from tests.fuzz.shrink import shrink
from tests.fuzz.snippet import snippet
from tests.fuzz.worker import judge

SEEDS = range(7000, 7040)


def test_a_seed_draws_the_same_case_which_reads_back() -> None:
    for seed in range(300):
        case = draw(seed)
        assert draw(seed) == case
        assert reread(repr(case)) == case


def test_a_case_has_the_same_numbers_every_time() -> None:
    for seed in SEEDS:
        first, second = (build(draw(seed)).operands() for _ in range(2))
        for name, tensor in first.items():
            assert tensor.stride() == second[name].stride()
            torch.testing.assert_close(tensor, second[name], rtol=0, atol=0, equal_nan=True)


def test_the_draws_cover_what_there_is() -> None:
    cases = [draw(seed) for seed in range(3000)]
    assert {case.dtype for case in cases} == {"float64", "float32", "bfloat16", "float16"}
    for wanted in (
        lambda c: c.head_dim % 2 and c.head_dim > 256,
        lambda c: c.value_dim != c.head_dim,
        lambda c: c.queries == 0 and c.sequences is None,
        lambda c: c.keys == 0 and c.sequences is None,
        lambda c: c.heads > c.kv_heads == 1,
        lambda c: c.page_size,
        lambda c: c.sequences is not None and c.grads,
        lambda c: c.dropout_p and c.sinks,
        lambda c: c.entropy_grad and c.lse_grad,
        lambda c: c.stats == "top1",
        lambda c: c.second,
        lambda c: c.layouts[1].expanded and c.layouts[1].step > 1,
        lambda c: any(t.grad for t in c.tables) and not c.grads,
        lambda c: any(t.layout.expanded for t in c.tables),
        lambda c: c.mask is not None and "document" in c.mask.source(),
        lambda c: c.mask is not None and "~" in c.mask.source(),
        lambda c: any("where" in node.source() for node in c.scores),
        lambda c: len(c.scores) == 3,
        lambda c: c.listed and c.grads and c.list_block == 1,
        lambda c: c.listed and c.mask is not None and c.list_block > 1,
    ):
        assert sum(bool(wanted(case)) for case in cases) >= 3
    operations = " ".join(n.source() for c in cases for n in (*c.scores, c.mask) if n is not None)
    for name in ("tanh", "sigmoid", "exp2", "log2", "rsqrt", "relu", ">>", "//", "length", "alibi"):
        assert name in operations


def test_no_captured_tensor_is_larger_than_the_problem_is_meant_to_be() -> None:
    # Seed 27886923 drew one of 561 x 566 x 566 numbers, and its gradients filled the machine.
    for seed in (*range(5_000), 27_886_923):
        for table in draw(seed).tables:
            assert table.how != "read" or math.prod(table.sizes) <= 1 << 24


@pytest.mark.parametrize("seed", SEEDS)
def test_what_it_draws_holds(seed: int) -> None:
    check(draw(seed))


def _plant(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    def attend(case: Case, call: Any, more: dict[str, Any]) -> Any:
        result = original(case, call, more)
        return wrong(case, result)

    original = building.attend
    monkeypatch.setattr(building, "attend", attend)


@pytest.mark.thorough
def test_a_planted_error_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key of a problem with more than 16 keys and grouped heads is not seen."""

    def wrong(case: Case, result: Any) -> Any:
        if case.extents[3] > 16 and case.heads > case.kv_heads:
            return result._replace(out=result.out * 1.01)
        return result

    _plant(monkeypatch, wrong)
    found = [draw(seed) for seed in range(100, 160) if judge(draw(seed))[0] == "wrong"]
    assert found
    small = shrink(found[0], lambda case: judge(case)[0] or None)
    assert small.extents == (1, 2, 1, 17)
    assert (small.kv_heads, small.head_dim, small.mask, small.scores) == (1, 1, None, ())
    assert len(repr(small)) < 130


@pytest.mark.parametrize(
    ("outputs", "kind"), [(("out", "lse", "grad of q"), ""), (("out",), "inexact")]
)
def test_an_excess_shows_again_in_the_same_output(
    monkeypatch: pytest.MonkeyPatch, outputs: tuple[str, ...], kind: str
) -> None:
    """Three outputs, each over in a third of all draws by luck, are no fault."""
    over = itertools.cycle(outputs)

    def excesses(_: object) -> list[checking.ExcessError]:
        return [checking.ExcessError("over", 3.0, next(over), 6)]

    monkeypatch.setattr(checking, "_excesses", excesses)
    assert judge(Case(queries=3, keys=3, head_dim=2))[0] == kind


def test_bits_that_depend_on_threads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case, result: Any) -> Any:
        if torch.get_num_threads() == 2:
            return result._replace(out=torch.nextafter(result.out, result.out + 1))
        return result

    _plant(monkeypatch, wrong)
    with pytest.raises(FaultError, match="with 1 and with 2 threads") as caught:
        check(Case(queries=5, keys=5, head_dim=4))
    assert caught.value.kind == "bits"


def test_a_top_key_may_be_any_that_rounding_cannot_tell_from_the_largest() -> None:
    """sin(s ** 3) has few true digits in float32, so another key may be the largest there."""
    sine = Node("float", "torch.sin(s ** 3)")
    score = Node("score", "scores.function(lambda s, b, h, m, n: {})", (sine,), means="{}")
    case = Case(queries=70, keys=70, head_dim=16, scores=(score,), gain=4.0, stats="top1")
    assert judge(case) == ("", "")


def test_a_wrong_statistic_and_a_wrong_top_key_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(queries=9, keys=40, head_dim=4, stats="top1", gain=3.0)
    check(case)

    def other_key(_: Case, result: Any) -> Any:
        wrong = result.stats._replace(top1=(result.stats.top1 + 1) % 40)
        return result._replace(stats=wrong)

    with monkeypatch.context() as patch:
        _plant(patch, other_key)
        assert judge(case)[0] == "top1"

    def other_entropy(_: Case, result: Any) -> Any:
        return result._replace(stats=result.stats._replace(entropy=result.stats.entropy + 1e-3))

    _plant(monkeypatch, other_entropy)
    assert judge(case)[0] == "wrong"


def test_what_the_library_reads_into_a_function_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Float64 has two references, of which one goes through the library's own tracing."""
    node = Node("score", "scores.function(lambda s, b, h, m, n: s + 0.5 * n)", (), "s - 0.5 * n")
    case = Case(dtype="float64", queries=3, keys=3, head_dim=2, scores=(node,))
    assert judge(case)[0] == "meaning"


def test_a_wrong_second_derivative_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(queries=5, keys=7, head_dim=4, value_dim=3, grads=("q", "k", "v"), second=True)
    check(case)
    found = run(case, build(case))
    assert all(float(found[f"second of {name}"].abs().max()) > 0.01 for name in "qkv")

    class Crooked(torch.autograd.Function):
        """The identity, but for the derivative of its derivative."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] + 0.5 * (x - x.detach())

    _plant(monkeypatch, lambda _, result: result._replace(out=Crooked.apply(result.out)))
    kind, words = judge(case)
    assert kind == "wrong"
    assert words.startswith("second of")


def test_a_written_operand_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(case: Case, call: Any, more: dict[str, Any]) -> Any:
        result = original(case, call, more)
        call.k[..., :1] += 1
        return result

    original = building.attend
    monkeypatch.setattr(building, "attend", attend)
    assert judge(Case(keys=3, head_dim=2))[0] == "wrote"


def _in_a_process(code: str) -> str:
    """What Python says: here threads have run, and a process forked after that can hang."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    return done.stdout


@pytest.mark.thorough
def test_a_crash_is_said_with_its_seed_and_the_next_one_is_checked() -> None:
    said = _in_a_process(
        """
import os
from tests.fuzz import build, worker
from tests.fuzz.case import Case

def attend(case, call, more):
    if case.values == 3:
        os.kill(os.getpid(), 11)
    return original(case, call, more)

original, build.attend = build.attend, attend
def cases(child, after):
    return ((seed, Case(values=seed), "") for seed in range(0 if after is None else after + 1, 6))

print([(verdict.seed, verdict.kind) for verdict in worker.pool(cases, 1)])
print(worker.one(Case(values=3))[0], worker.one(Case(values=4)))
"""
    )
    expected = [(0, ""), (1, ""), (2, ""), (3, "SIGSEGV"), (4, ""), (5, "")]
    assert said.splitlines() == [str(expected), "SIGSEGV ('', '')"]


@pytest.mark.thorough
def test_a_case_that_never_ends_is_said() -> None:
    said = _in_a_process(
        """
import time
from tests.fuzz import build, worker
from tests.fuzz.case import Case

def attend(case, call, more):
    time.sleep(600)

build.attend, worker.PATIENCE_S = attend, 0.5
print(worker.one(Case()))
"""
    )
    assert "hang" in said


@pytest.mark.thorough
@pytest.mark.parametrize("side", ["end", "begin"])
def test_a_guard_page_faults(side: str) -> None:
    """In a child: one element beyond is deadly, and the last one is not."""
    code = (
        "import ctypes, sys, torch\n"
        "from tests.fuzz.memory import Guarded\n"
        f"flat = Guarded({side!r}).flat(5, torch.float32)\n"
        "place = flat.data_ptr() + 4 * int(sys.argv[1])\n"
        "ctypes.c_float.from_address(place).value = 1.0\n"
    )
    last, beyond = ("4", "5") if side == "end" else ("0", "-1")
    for place, status in ((last, 0), (beyond, -11)):
        done = subprocess.run([sys.executable, "-c", code, place], check=False, timeout=120)
        assert done.returncode == status


def test_guarded_calls_hold_and_give_their_memory_back() -> None:
    case = draw(7003)
    heap = Guarded("end")
    build(case, heap)
    assert heap.mapped
    heap.free()
    assert not heap.mapped
    check(Case(queries=17, keys=33, head_dim=7, value_dim=5, grads=("q", "k", "v")), "end")
    check(Case(queries=17, keys=33, head_dim=7, value_dim=5, grads=("q", "k", "v")), "begin")


def test_layouts_hold_the_values_and_nan_between() -> None:
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    layout = Layout((1, 0, 2), (1, 2, 3), 2, 7)
    placed = lay(values, torch.float64, layout, Heap())
    assert placed.equal(values)
    assert placed.stride()[-1] == 2
    assert placed.stride()[-2] > placed.stride()[-3]
    assert placed.storage_offset() == 7
    whole = placed.new_empty(0).set_(placed.untyped_storage())
    assert int(whole.isnan().sum()) == whole.numel() - values.numel()
    expanded = lay(values, torch.float64, Layout(expanded=(0, 2)), Heap())
    assert expanded.stride()[0] == expanded.stride()[2] == 0
    assert expanded[1, :, 3].equal(values[0, :, 0])


@pytest.mark.parametrize(
    "lists", [{}, {"listed": 2}, {"listed": 2, "list_block": 3, "lists_shared": True}]
)
def test_a_printed_script_makes_the_same_call(
    lists: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node("score", "scores.bias(t0)", (), "s + at(t0, b, h, m, n)")
    case = Case(
        values=5,
        isa=tilewise._core.isa_available()[-1],
        heads=2,
        kv_heads=1,
        queries=3,
        keys=4,
        head_dim=6,
        value_dim=2,
        scores=(node,),
        tables=(Table("float", (3, 4), grad=True),),
        grads=("q",),
        layouts=(Layout((1, 0, 2)), Layout(), Layout((0, 2, 1)), Layout()),
        **lists,
    )
    names: dict[str, Any] = {}
    before = torch.get_num_threads(), tilewise._core.isa_active()
    try:
        exec(snippet(case), names)
        expected = run(case, build(case))
    finally:
        torch.set_num_threads(before[0])
        tilewise._core.set_isa(before[1])
    assert names["result"].out.equal(expected["out"])
    assert "grad_fn" in capsys.readouterr().out


def test_a_check_leaves_the_process_as_it_was() -> None:
    """Other tests of the same process would run on another instruction set, with other bits."""
    before = tilewise._core.isa_active(), torch.get_num_threads()
    check(Case(values=5, isa=tilewise._core.isa_available()[-1], threads=3, queries=3, keys=4))
    assert (tilewise._core.isa_active(), torch.get_num_threads()) == before


@pytest.mark.thorough
def test_the_command_says_a_seed_that_fails_and_goes_on() -> None:
    def full(seed: int) -> bool:
        return draw(seed).work() > 0

    first = next(seed for seed in range(7000, 9000) if all(map(full, range(seed, seed + 4))))
    said = _in_a_process(
        f"""
from dataclasses import replace
import torch
from tests.fuzz import build
from tests.fuzz.__main__ import main
from tests.fuzz.draw import draw

assert main(["--problems", "4", "--seed", "{first}", "--jobs", "1"]) == 0
original = build.attend
def attend(case, call, more):
    result = original(case, call, more)
    return result._replace(out=result.out + 1000)

build.attend = attend
assert main(["--problems", "4", "--seed", "{first}", "--jobs", "2", "--no-shrink"]) == 1
assert main(["--problems", "4", "--seed", "{first}", "--report-inexact", "--no-shrink"]) == 1
def slightly(case, call, more):
    result = original(case, call, more)
    return result._replace(out=result.out * (1 + 20 * torch.finfo(result.out.dtype).eps))

build.attend = slightly
some = ["--problems", "40", "--seed", "{first}", "--no-shrink"]
assert main(some) == 1
assert main([*some, "--report-inexact"]) == 0
build.attend = attend
assert main(["--one", "{first}", "--no-shrink"]) == 1
assert main(["--case", repr(replace(draw({first}), mask=None)), "--no-shrink"]) == 1
"""
    )
    assert "4 problems, 0 failed" in said
    assert f"FAILED seed {first}: wrong" in said
    assert f"./run fuzz --one {first}" in said
    assert "4 problems, 4 failed" in said
    assert f"from seed {first}" in said
