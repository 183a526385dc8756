"""The Gluon kernels for Hopper in the emulator: numbers, leaks, protocol, and what they serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, count, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import Case, Inputs, build
from tests.contract import assert_same_bits
from tests.kernels.gpu.emulator import Block, Chip, EmulatorError, emulate
from tests.kernels.gpu.faults import Fault, moved, with_fault, without
from tests.kernels.gpu.passes import GQA, HALVES, NAN, prepare_forward, variant
from tests.oracle import Outcome, Sent, check_twice, problem_of, send
from tilewise import masks
from tilewise.kernels.gpu import Launch, config, run
from tilewise.kernels.gpu.backward import Upstream, backward_of
from tilewise.kernels.gpu.backward import groups as keys
from tilewise.kernels.gpu.backward.passes import backward_launches
from tilewise.kernels.gpu.config import FAMILIES, Blocks, Config
from tilewise.kernels.gpu.expressions import variant_of
from tilewise.kernels.gpu.forward import groups as forward
from tilewise.kernels.gpu.walk import groups as tiles
from tilewise.kernels.gpu.walk.tiles import range_of, split_range
from tilewise.problem import Grads, Needs, Operands, Problem, Result
from tilewise.reference import blocks, programs, tiled
from tilewise.variants.program import RAW, Instr

HOPPER = Config("sm_90")
TILE = 128  # queries of a program of the forward pass, keys of one of dK and dV


@dataclass(frozen=True)
class Window:
    """The maker of a window; its text is the same in every process, and makes a case's numbers."""

    left: int | None
    right: int | None
    align: str = "bottom_right"

    def __call__(self, _: Any) -> Any:
        return masks.window(self.left, self.right, self.align)


@dataclass(frozen=True)
class Documents:
    """The maker of a mask of documents that end at these places and with the last key."""

    ends: tuple[int, ...]

    def __call__(self, drawn: Any) -> Any:
        return masks.document(torch.bucketize(torch.arange(drawn.keys), torch.tensor(self.ends)))


@dataclass(frozen=True)
class Layout:
    """The maker of a mask of tiles of 128 x 128 pairs, which differs by head.

    A row of tiles is a text. A tile shows all of its pairs (2), half of them (1) or none (0).
    """

    heads: tuple[tuple[str, ...], ...]

    def __call__(self, drawn: Any) -> Any:
        kinds = torch.tensor([[[int(kind) for kind in row] for row in rows] for rows in self.heads])
        pairs = kinds.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)
        pairs = pairs[None, :, : drawn.queries, : drawn.keys]
        return masks.dense(pairs - drawn.uniform(*pairs.shape) > 0.5)


SHAPE: dict[str, Any] = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 128, "value_dim": 128}
ODD = SHAPE | {"queries": 333, "keys": 333}
SHORT = SHAPE | {"queries": 200, "keys": 200}
PLAIN = [
    Case("full", **SHAPE, queries=200, keys=333),
    Case("causal", **ODD, mask=("causal",)),
    Case("causal-short", **SHORT, mask=("causal",), scale=-0.2),
    Case("grouped", **SHORT | GQA, mask=("causal",), layout="bshd"),
    Case("sinks", **SHORT | {"heads": 2, "kv_heads": 1, "batch": 2}, mask=("causal",), sinks=True),
    Case("window", **SHAPE, queries=512, keys=512, mask=(Window(128, 0),)),
    Case("both-sides", **ODD, mask=(Window(128, 128),)),
    Case("two-bands", **ODD, mask=(Window(None, 0), Window(128, 256, "top_left"), "and")),
    Case("anchored", **SHAPE, queries=200, keys=328, mask=("causal",)),
    Case("tiny", **SHAPE, queries=17, keys=5),
    Case("no-keys-first", **SHAPE, queries=384, keys=128, mask=("causal",), sinks=True),
    Case("no-keys-last", **SHAPE, queries=512, keys=128, mask=(Window(128, 0, "top_left"),)),
]
# Rows of tiles that list nothing, whole tiles, and a key tile that no head of a group sees.
BY_HEAD = Layout(
    (("021", "000", "011"), ("000", "011", "002"), ("210", "012", "000"), ("200", "111", "022"))
)
LISTED = [
    Case("documents", **ODD, mask=(Documents((150, 300)), "causal", "and", "tiles")),
    Case("whole-tiles", **ODD | {"heads": 2}, mask=(Documents((290,)), "tiles"), sinks=True),
    Case("by-head", **SHAPE | GQA, queries=300, keys=333, mask=(BY_HEAD, "tiles")),
    Case("by-item", **SHORT | {"batch": 2}, mask=("document_each", "tiles"), layout="bshd"),
]
# Of dK and dV alone.
SCORED = [
    Case(f"{score}{name}", **SHORT | {"heads": 2}, mask=mask, score=(score,))
    for score in ("alibi", "softcap_tight", "bias_inf", "bias_keys")
    for name, mask in (("", ()), ("-causal", ("causal",)))
]
SCORED.append(replace(LISTED[0], name="alibi-documents", score=("alibi",)))
CASES = PLAIN + LISTED + SCORED
MASKED = [case for case in CASES if case.mask and not case.score]


def _name(of: Any) -> str:
    return str(of.name)


def _served_forward(problem: Problem, operands: Operands) -> tuple[Result, Launch]:
    result, launches = prepare_forward(problem, operands, HOPPER)
    (launch,) = launches
    assert launch.kernel is forward.attend_in_groups
    return result, launch


def _forward(problem: Problem, operands: Operands, seed: int) -> Result:
    result, launch = _served_forward(problem, operands)
    emulate(launch, seed)
    return result


def _served_keys(
    problem: Problem, operands: Operands, result: Result, sent: Sent
) -> tuple[Grads, Launch]:
    """Gradients that hold NaN still, and the launch that fills them; what it needs has run."""
    grads = Grads(None, torch.full_like(operands.k, NAN), torch.full_like(operands.v, NAN))
    incoming = Upstream(sent.out, sent.lse), Needs(False, True, True)
    own = variant(problem, operands)
    call = backward_of(problem, operands, result, *incoming, HOPPER, own)
    *before, launch = backward_launches(call, grads)
    assert launch.kernel is keys.keys_in_groups
    run(before)
    return grads, launch


def _keys(problem: Problem, operands: Operands, result: Result, sent: Sent, seed: int) -> Grads:
    grads, launch = _served_keys(problem, operands, result, sent)
    emulate(launch, seed)
    return grads


def _check(case: Case, draws: int) -> None:
    """The 2x rule for dK and dV and, where it is served, for the forward pass."""
    seeds = count()

    def outcome(inputs: Inputs, sent: Sent) -> Outcome:
        problem, operands = problem_of(inputs.detached())
        result = tiled.forward(problem, operands, "")
        if HOPPER.in_groups("forward", problem):
            expected, result = result, _forward(problem, operands, next(seeds))
            torch.testing.assert_close(result.stats, expected.stats, rtol=1e-5, atol=1e-5)
        grads = _keys(problem, operands, result, sent._replace(entropy=None), next(seeds))
        return Outcome(result.out, result.lse, {"k": grads.k, "v": grads.v})

    check_twice(case, draws, outcome)


def of_width(case: Case, width: int, dtype: torch.dtype) -> Case:
    name = f"{case.name}-{width}"
    return replace(case, name=name, head_dim=width, value_dim=width, dtype=dtype)


# Each width in either type; of dK and dV alone where no forward pass is served. Each score has one
# width with a mask, the other without.
SAMPLE = [
    of_width(case, width, HALVES[(index + width // 64) % 2])
    for width in (64, 128)
    for index, case in enumerate(CASES)
    if not case.score or (index // 2 + index + width // 64) % 2
]


@pytest.mark.parametrize("case", SAMPLE, ids=_name)
def test_both_passes(case: Case) -> None:
    """out, lse, dK and dV by the 2x rule; maxima and sums of rows are those of the reference."""
    _check(case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_many_seeds(case: Case, dtype: torch.dtype, width: int) -> None:
    _check(of_width(case, width, dtype), 10)


# ---- leaks ---------------------------------------------------------------------------------------


def _band(problem: Problem, instr: Instr) -> Tensor:
    """Which pairs a band shows, by its definition."""
    left, right, anchor = (int(number) for number in instr.params)
    more = problem.keys - problem.queries if anchor else 0
    distance = torch.arange(problem.keys) - torch.arange(problem.queries)[:, None] - more
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def shown_pairs(problem: Problem) -> Tensor:
    """Which pairs a mask of bands shows."""
    bands = [_band(problem, instr) for instr in problem.mask if instr.op == "band"]
    return torch.stack(bands).all(0)


def hidden_from(
    problem: Problem, operands: Operands, by_keys: bool, tile: slice, side: int
) -> Tensor:
    """Which keys a tile of queries does not see, or which queries a tile of keys, of each head.

    A table says so of tiles of ``side``; the other pairs of a tile that it lists are multiplied.
    """
    B, H, M, N = problem.batch, problem.heads, problem.queries, problem.keys
    every = blocks.Block(range(M), range(N), M, N, range(B), range(H))
    pairs = programs.visible(problem.mask, operands.mask_tensors, every, operands.q.device)
    pairs = pairs.expand(B, H, M, N)
    if by_keys:
        seen = pairs[:, :, :, tile].any(3)
    else:
        seen = pairs[:, :, tile].any(2).unflatten(1, (problem.kv_heads, -1)).any(2)
    if any(instr.op == "tiles" for instr in problem.mask):
        for part in seen.split(side, 2):
            part |= part.any(2, keepdim=True)
    return ~seen


@pytest.mark.parametrize("case", MASKED, ids=_name)
def test_keys_hidden_from_a_tile_may_be_nan(case: Case) -> None:
    problem, operands = problem_of(build(case.of(torch.float16)).detached())
    good = _forward(problem, operands, 0)
    for seed, first in enumerate(range(0, problem.queries, TILE)):
        tile = slice(first, first + TILE)
        hidden = hidden_from(problem, operands, False, tile, 128)
        k, v = operands.k.clone(), operands.v.clone()
        k[hidden] = v[hidden] = NAN
        got = _forward(problem, operands._replace(k=k, v=v), seed)
        for name in ("out", "lse"):
            one, other = (getattr(result, name)[:, :, tile] for result in (got, good))
            assert_same_bits(one, other, f"{name} from row {first}")


@pytest.mark.parametrize("case", MASKED, ids=_name)
def test_queries_hidden_from_a_tile_may_be_nan(case: Case) -> None:
    inputs = build(case.of(torch.float16)).detached()
    problem, operands = problem_of(inputs)
    sent = send(build(case.of(torch.float16)))._replace(entropy=None)
    result = tiled.forward(problem, operands, "")
    good = _keys(problem, operands, result, sent, 0)
    for seed, first in enumerate(range(0, problem.keys, TILE)):
        tile = slice(first, first + TILE)
        hidden = hidden_from(problem, operands, True, tile, 64)
        q, grad = operands.q.clone(), sent.out.clone()
        q[hidden] = grad[hidden] = NAN
        bad = operands._replace(q=q), result, sent._replace(out=grad)
        got = _keys(problem, *bad, seed)
        for name in ("k", "v"):
            one, other = (getattr(grads, name)[:, :, tile] for grads in (got, good))
            assert_same_bits(one, other, f"d{name} from key {first}")


# ---- the protocol --------------------------------------------------------------------------------


# Keys released early are no fault but for the first tile: the loader waits for the values of the
# tile before, and these are released later.
FORWARD_FAULTS = [
    moved(
        "    mbarrier.arrive(v_empty.index(before), count=1)",
        "    sums = warpgroup_mma_wait(0, deps=[sums])",
        "values released early",
    ),
    moved(
        "    mbarrier.arrive(k_empty.index(0), count=1)",
        "    products = warpgroup_mma_wait(0, deps=[products])",
        "first keys released early",
    ),
    without("    mbarrier.arrive(k_empty.index(here), count=1)", "keys never released"),
    Fault("scores before their wait", "warpgroup_mma_wait(1, deps", "warpgroup_mma_wait(2, deps"),
    Fault("sums before their wait", "warpgroup_mma_wait(0, deps=[sums])\n    mbarrier",
          "warpgroup_mma_wait(1, deps=[sums])\n    mbarrier"),
    Fault("phase of the loader", "((j // FORM.STAGES) & 1) ^ 1", "(j // FORM.STAGES) & 1"),
    Fault("phase of the keys", "k_full.index(here), (j //", "k_full.index(here), ((j + 1) //"),
    Fault("phase of the values", "v_full.index(before), ((j - 1)", "v_full.index(before), ((j)"),
    Fault("place of the values", "before = (j - 1) % FORM.STAGES", "before = j % FORM.STAGES"),
    without("        mbarrier.wait(k_empty.index(place_of), free)", "keys overwritten"),
    without("        mbarrier.wait(v_empty.index(place_of), free)", "values overwritten"),
    without("    mbarrier.wait(q_full.index(c), 0)", "no wait for queries"),
    without("    mbarrier.wait(k_full.index(0), 0)", "no wait for first keys"),
    without("    mbarrier.wait(k_full.index(here), (j // FORM.STAGES) & 1)", "no wait for keys"),
    without(
        "    mbarrier.wait(v_full.index(before), ((j - 1) // FORM.STAGES) & 1)",
        "no wait for values",
    ),
    without(
        "    mbarrier.wait(v_full.index(place_of), (last // FORM.STAGES) & 1)",
        "no wait for last values",
    ),
    Fault("count of empty keys", "v_empty = barriers(ST, RELEASES),", "v_empty = barriers(ST, 1),"),
    Fault("count of empty values", ", barriers(ST, RELEASES)", ", barriers(ST, 1)"),
    Fault("no fence", "    fence_async_shared()\n    async_store", "    async_store"),
    without("    tma.store_wait(0)", "no wait for the store"),
]  # fmt: skip
KEY_FAULTS = [
    moved(
        "    mbarrier.arrive(empty.index(here), count=1)",
        "    total_k, total_v = warpgroup_mma_wait(0, deps=[total_k, total_v])",
        "released early",
    ),
    without("    mbarrier.arrive(empty.index(here), count=1)", "never released"),
    Fault("products before their wait", "warpgroup_mma_wait(0, deps=[products",
          "warpgroup_mma_wait(1, deps=[products"),
    Fault("sums before their wait", "warpgroup_mma_wait(0, deps=[total_k",
          "warpgroup_mma_wait(1, deps=[total_k"),
    Fault("phase of the loader", "((t // FORM.STAGES) & 1) ^ 1)", "(t // FORM.STAGES) & 1)"),
    Fault("phase of the queries", "turn = (t //", "turn = ((t + 1) //"),
    without(
        "        mbarrier.wait(empty.index(here), ((t // FORM.STAGES) & 1) ^ 1)",
        "overwritten",
    ),
    without("    mbarrier.wait(q_full.index(here), turn)", "no wait for queries"),
    without("    mbarrier.wait(g_full.index(here), turn)", "no wait for gradients"),
    without("    mbarrier.wait(held.index(c), 0)", "no wait for keys"),
    Fault("count of empty", "barriers(ST, 1), barriers(ST, GROUPS)",
          "barriers(ST, 1), barriers(ST, 1)"),
    Fault("keys without values", "barriers(GROUPS, 2)", "barriers(GROUPS, 1)"),
    Fault("no fence", "    fence_async_shared()\n    async_store", "    async_store"),
    without("    tma.store_wait(0)", "no wait for the stores"),
]  # fmt: skip
# Of ``walk/groups.py``; they show in both passes.
LIST_FAULTS = [
    Fault("whole tiles first", "gl.where(j < partial, j + whole, j - partial)", "j"),
    Fault("kinds exchanged", "listed, whole, partial =", "listed, partial, whole ="),
    Fault(
        "lists of the first head", "list_of(lists, b, h, tile)", "list_of(lists, b, h * 0, tile)"
    ),
    Fault(
        "lists of the first tile", "list_of(lists, b, h, tile)", "list_of(lists, b, h, tile * 0)"
    ),
    Fault("expected bytes", "rows.block_type.nbytes)", "rows.block_type.nbytes // 2)"),
]
SEEDS = range(40)


def _with_lists(module: Any, fault: Fault, folder: Path) -> Any:
    """A copy of a module of kernels whose tiles are counted, listed and fetched with a fault."""
    found = with_fault(module, Fault("", "from __future__", "from __future__"), folder)
    wrong = with_fault(tiles, fault, folder)
    found.counted, found.tile_at, found.fetch = wrong.counted, wrong.tile_at, wrong.fetch
    return found


class Run(NamedTuple):
    """A launch, the tensors that it writes, and what is right for them."""

    launch: Launch
    written: tuple[Tensor, ...]
    right: tuple[Tensor, ...]

    def differs(self, kernel: Any, seed: int) -> bool:
        """Whether the emulator or the numbers tell a kernel from the right one."""
        for tensor in self.written:
            tensor.fill_(NAN)
        try:
            emulate(self.launch._replace(kernel=kernel), seed)
        except EmulatorError:
            return True
        return not all(map(torch.equal, self.written, self.right))


def run_of(written: tuple[Tensor, ...], launch: Launch) -> Run:
    emulate(launch, 0)
    return Run(launch, written, tuple([tensor.clone() for tensor in written]))


# Enough tiles to go around a ring several times.
FORWARD_CASE = Case("ring", **SHAPE, queries=128, keys=1024, dtype=torch.float16)
KEY_CASE = Case(
    "ring", **SHAPE | {"head_dim": 64, "value_dim": 64}, queries=640, keys=128, dtype=torch.float16
)


LIST_CASE = Case(
    "lists", **SHAPE | GQA, queries=300, keys=333, mask=(BY_HEAD, "tiles"), dtype=torch.float16
)


def _forward_run(problem: Problem, operands: Operands) -> Run:
    result, launch = _served_forward(problem, operands)
    return run_of((result.out, result.lse, result.stats), launch)


def _key_run(inputs: Inputs) -> Run:
    problem, operands = problem_of(inputs.detached())
    result = tiled.forward(problem, operands, "")
    grads, launch = _served_keys(problem, operands, result, send(inputs)._replace(entropy=None))
    assert grads.k is not None
    assert grads.v is not None
    return run_of((grads.k, grads.v), launch)


@pytest.fixture(scope="module")
def forward_run() -> Run:
    return _forward_run(*problem_of(build(FORWARD_CASE).detached()))


@pytest.fixture(scope="module")
def key_run() -> Run:
    return _key_run(build(KEY_CASE))


@pytest.fixture(scope="module")
def listed_runs() -> tuple[Run, Run]:
    """Of both passes; in the forward pass keys and values that no query sees are NaN."""
    inputs = build(LIST_CASE)
    problem, operands = problem_of(inputs.detached())
    operands.k[:, 0, :TILE] = operands.v[:, 0, :TILE] = NAN
    return _forward_run(problem, operands), _key_run(build(LIST_CASE))


@pytest.mark.parametrize("fault", FORWARD_FAULTS, ids=_name)
def test_a_fault_of_the_forward_pass_is_found(
    fault: Fault, forward_run: Run, tmp_path: Path
) -> None:
    kernel = with_fault(forward, fault, tmp_path).attend_in_groups
    assert any(forward_run.differs(kernel, seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", KEY_FAULTS, ids=_name)
def test_a_fault_of_the_key_pass_is_found(fault: Fault, key_run: Run, tmp_path: Path) -> None:
    kernel = with_fault(keys, fault, tmp_path).keys_in_groups
    assert any(key_run.differs(kernel, seed) for seed in SEEDS)


def test_a_fault_of_lists_is_found(listed_runs: tuple[Run, Run], tmp_path: Path) -> None:
    for fault in LIST_FAULTS:
        kernel = _with_lists(forward, fault, tmp_path).attend_in_groups
        assert listed_runs[0].differs(kernel, 0), fault.name
        kernel = _with_lists(keys, fault, tmp_path).keys_in_groups
        assert listed_runs[1].differs(kernel, 0), fault.name


def test_a_tile_that_is_not_moved_is_found(listed_runs: tuple[Run, Run], tmp_path: Path) -> None:
    """A row of tiles that lists nothing meets the first one of its list."""
    fault = Fault("not moved", "return first + moved", "return first")
    kernel = _with_lists(forward, fault, tmp_path).attend_in_groups
    assert listed_runs[0].differs(kernel, 0)


def test_tiles_of_heads_before_are_counted(listed_runs: tuple[Run, Run], tmp_path: Path) -> None:
    kernel = with_fault(keys, without("        before += count", "before"), tmp_path)
    assert any(listed_runs[1].differs(kernel.keys_in_groups, seed) for seed in SEEDS)


def test_every_order_gives_the_same_bits(forward_run: Run, key_run: Run) -> None:
    for each in (forward_run, key_run):
        assert not any(each.differs(each.launch.kernel, seed) for seed in SEEDS)


# ---- which calls are served ----------------------------------------------------------------------


def problem_with(*mask: Instr, queries: int = 384, keys: int = 384, **changed: Any) -> Problem:
    plain = Problem(
        batch=1,
        heads=2,
        kv_heads=2,
        queries=queries,
        keys=keys,
        head_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        layout="dense",
        mask=mask,
        score=(),
        scale=0.1,
        dropout_p=0.0,
        sinks=False,
    )
    return plain._replace(**changed)


def window(left: int, right: int, anchor: int = 1) -> Instr:
    return Instr("band", (left, right, anchor))


CAUSAL, AND, OR = window(-1, 0), Instr("and"), Instr("or")
DOCUMENTS = Instr("same_document", (), (0, 1))
TABLE = Instr("tiles", (128, 128, 0, 0, 384, 384, 0), (2,))
SERVED = {
    "full": problem_with(),
    "float16": problem_with(dtype=torch.float16),
    "sinks": problem_with(sinks=True),
    "grouped": problem_with(kv_heads=1),
    "negative scale": problem_with(scale=-1.0),
    "causal": problem_with(CAUSAL, queries=333, keys=333),
    "window": problem_with(window(256, 128), queries=333, keys=333),
    "anchored": problem_with(CAUSAL, queries=200, keys=328),
    "rows without keys": problem_with(CAUSAL, queries=384, keys=128),
    "two bands": problem_with(CAUSAL, window(128, -1), AND),
    "tiles": problem_with(CAUSAL, TABLE),
    "tiles of documents": problem_with(DOCUMENTS, CAUSAL, AND, TABLE, queries=333, keys=333),
    "tiles of tiles": problem_with(DOCUMENTS, TABLE, CAUSAL, OR, TABLE),
}
CAP = Instr("softcap", (20.0,))
NOT_SERVED = {
    "edge": problem_with(window(100, 0)),
    "other edge": problem_with(window(128, 20)),
    "anchored elsewhere": problem_with(CAUSAL, queries=200, keys=333),
    "last rows": problem_with(CAUSAL._replace(params=(-1, 0, 0)), queries=200, keys=333),
    "one of two": problem_with(CAUSAL, window(100, -1), AND),
    "either": problem_with(CAUSAL, window(128, -1), OR),
    "not": problem_with(CAUSAL, Instr("not")),
    "lengths": problem_with(Instr("below", (), (0,))),
    "documents": problem_with(DOCUMENTS),
    "tiles with lengths": problem_with(DOCUMENTS, Instr("below", (), (3,)), AND, TABLE),
    "tiles with an edge": problem_with(DOCUMENTS, window(100, 0), AND, TABLE),
    "tiles of one of two": problem_with(DOCUMENTS, TABLE, CAUSAL, AND),
    "tiles of either": problem_with(DOCUMENTS, TABLE, CAUSAL, OR),
    "tiles of what is not": problem_with(DOCUMENTS, TABLE, Instr("not")),
    "raw score": problem_with(score=(CAP, Instr(RAW, ("weigh",), (0,)))),
    "dropout": problem_with(dropout_p=0.1),
    "pages": problem_with(page_size=128),
    "packed": problem_with(layout="varlen"),
    "float32": problem_with(dtype=torch.float32),
    "float8 that is not asked for": problem_with(dtype=torch.float8_e4m3fn),
    "narrow values": problem_with(value_dim=64),
    "wide": problem_with(head_dim=256, value_dim=256),
    "between": problem_with(head_dim=96, value_dim=96),
}


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    assert HOPPER.in_groups("forward", SERVED[name]) == Blocks(128, 128, 8, 2)
    assert HOPPER.in_groups("dkdv", SERVED[name]) == Blocks(64, 128, 8, 3)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_not_served(name: str) -> None:
    for each in config.PASSES:
        assert HOPPER.in_groups(each, NOT_SERVED[name]) is None


def test_what_else_decides() -> None:
    """The width, the score, the pass, the chip, and blocks that somebody asks for."""
    capped = problem_with(CAUSAL, score=(CAP,))
    assert HOPPER.in_groups("forward", capped) is None
    assert HOPPER.in_groups("dkdv", capped) == Blocks(32, 128, 8, 4)
    capped = capped._replace(head_dim=64, value_dim=64)
    assert HOPPER.in_groups("dkdv", capped) == Blocks(32, 128, 8, 4)
    narrow = problem_with(head_dim=64, value_dim=64)
    assert HOPPER.in_groups("forward", narrow) is None
    assert HOPPER.in_groups("dkdv", narrow) == Blocks(64, 128, 8, 2)
    asked = Config("sm_90", overrides=(("forward", Blocks(64, 64, 4, 2)),))
    assert asked.in_groups("forward", problem_with()) is None
    assert asked.in_groups("dkdv", problem_with()) is not None
    for name in config.PASSES:
        others = {family for family in FAMILIES if Config(family).in_groups(name, problem_with())}
        assert others == ({"sm_90"} if name in ("forward", "dkdv") else set())


def test_no_tile_has_rows_that_its_band_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: tiles of 4 for 128, all bands, all sizes. Rows beyond the last one are zeros."""
    monkeypatch.setattr(config, "_EDGE", 4)
    sides, sizes = (-1, 0, 1, 2, 3, 4, 6, 8, 12), range(1, 11)
    bands = [window(*params) for params in product(sides, sides, (0, 1))]
    served = 0
    for band, M, N in product(bands, sizes, sizes):
        problem = problem_with(band, queries=M, keys=N)
        if HOPPER.in_groups("forward", problem) is not None:
            served += 1
            _check_tiles(problem)
    assert served > 1000


def test_no_tile_has_rows_that_two_bands_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_EDGE", 4)
    sides, sizes = (-1, 0, 4), (3, 4, 8)
    bands = [window(*params) for params in product(sides, sides, (0, 1))]
    for one, other in combinations(bands, 2):
        for M, N in product(sizes, sizes):
            problem = problem_with(one, other, AND, queries=M, keys=N)
            if HOPPER.in_groups("forward", problem) is not None:
                _check_tiles(problem)


CHIP = Chip(0)


def _check_tiles(problem: Problem) -> None:
    """Each row that a tile meets, some row of the tile sees: of keys and of queries."""
    own, seen = variant_of(problem, (), ()), shown_pairs(problem)
    sides = problem.queries, problem.keys
    for ranges, met, step, by_keys in (
        (own.keys_of, seen, 4, False),
        (own.queries_of, seen.mT, 2, True),
    ):
        for first in range(0, met.shape[0], 4):
            tiles = rows_met(CHIP.stand_in(ranges), first, sides, step, by_keys)
            some = met[first : first + 4].any(0)
            hidden = [row for row in tiles if row < len(some) and not some[row]]
            assert not hidden, f"{problem.mask}, {sides}: {'keys' if by_keys else 'rows'} {first}"


def rows_met(
    ranges: Any, first: int, sides: tuple[int, int], step: int, by_keys: bool, of: int = 4
) -> list[int]:
    """The rows that the tile of ``of`` rows from ``first`` on meets, as the kernels find them."""
    number = [Block(np.int32(each)) for each in (0, first, *sides)]
    found = CHIP.lift(range_of)(*number, ((), ()), ranges, of, by_keys)
    end = sides[0] if by_keys else sides[1]
    left, _, _, right = map(int, CHIP.lift(split_range)(*found, end, step))
    return [row for start in range(left, right, step) for row in range(start, start + step)]
