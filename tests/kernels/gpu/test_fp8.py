"""float8 e4m3 in Triton's interpreter: exactness, scales, numbers at the edge, both kinds of chip.

The plain implementation of the 2x rule is ``reference/dense.py`` in float8; the oracle takes what
the numbers stand for in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import Case, build
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.gpu import passes, test_forward
from tests.kernels.gpu.passes import (
    BLOCKS,
    GQA,
    check_hidden,
    check_statistics,
    decode,
    forward,
    prepare_forward,
)
from tests.kernels.gpu.test_decode import SHORT
from tests.oracle import problem_of
from tilelab.cases.dense import dense
from tilewise import float8, masks, scores
from tilewise.engine.call import with_scales
from tilewise.kernels.gpu.config import FAMILIES, Blocks, Config
from tilewise.problem import Operands, Problem, Result, Statistics
from tilewise.variants.float8 import FLOAT8, Scales

SMALL = {**passes.SMALL, "batch": 2}
OTHERS = ("wide", "widest", "holes", "nested", "packed-all", "diagonal")
CASES = [
    case if case.sequences is not None else replace(case, batch=max(case.batch, 2))
    for case in test_forward.CASES
    if case.name not in OTHERS
]
KINDS = ("none", "tensor", "heads", "items")
HOW = ("whole", "short", "halves")


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way in which chips multiply float8; the engine's plans do not depend on it."""
    family = FAMILIES["interpreter"]._replace(fp8=request.param)
    with mock.patch.dict(FAMILIES, interpreter=family):
        yield request.param


def _turns(cases: list[Case]) -> pytest.MarkDecorator:
    """Each case in every way, and quickly in one way, the next case in the next."""
    found = [
        pytest.param(case, way, marks=() if (i + j) % len(HOW) == 0 else (pytest.mark.slow,))
        for i, case in enumerate(cases)
        for j, way in enumerate(HOW)
    ]
    names = [f"{case.name}-{way}" for case in cases for way in HOW]
    return pytest.mark.parametrize(("case", "how"), found, ids=names, indirect=["how"])


def _scales(kind: str, problem: Problem) -> Scales:
    """Scales of about 1, some of them negative, in each shape that a call takes."""
    generator = torch.Generator().manual_seed(len(kind))

    def one(heads: int) -> Tensor:
        sizes = {"tensor": (1, 1), "heads": (heads,), "items": (problem.batch, heads)}
        scale = 0.3 + torch.rand(sizes[kind], generator=generator)
        return scale * (1 - 2 * (torch.rand(scale.shape, generator=generator) < 0.3).float())

    if kind == "none":
        return Scales()
    return Scales(one(problem.heads), one(problem.kv_heads), one(problem.kv_heads))


def _call(case: Case, kind: str) -> tuple[Problem, Operands]:
    problem, operands = problem_of(build(case.of(FLOAT8)).detached())
    return problem, with_scales(operands, _scales(kind, problem), problem)


def _check(
    problem: Problem, operands: Operands, blocks: Blocks, statistics: Statistics = ""
) -> None:
    got = forward(problem, operands, blocks, statistics)
    assert got.out.dtype is torch.bfloat16
    names = ("out", "lse", "max_logit", "entropy") if statistics else ("out", "lse")
    _check_result(got, problem, operands, names)


def _check_result(
    got: Result, problem: Problem, operands: Operands, names: tuple[str, ...]
) -> None:
    plain = dense(problem, operands, dtype=FLOAT8)
    oracle = dense(problem, operands, dtype=torch.float64)
    for name in names:
        assert_exact(getattr(got, name), getattr(plain, name), getattr(oracle, name), name)


@_turns(CASES)
def test_the_2x_rule(case: Case, how: str) -> None:
    """Every feature, in blocks with many edges, with scales in every shape."""
    index = CASES.index(case)
    _check(*_call(case, KINDS[index % len(KINDS)]), BLOCKS[index % len(BLOCKS)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_2x_rule_everywhere(case: Case, kind: str, how: str) -> None:
    """All of them with all scales, statistics too."""
    for blocks in BLOCKS:
        _check(*_call(case, kind), blocks, "top1")


@_turns([case for case in CASES if case.name in ("plain", "causal-dead", "packed")])
def test_statistics(case: Case, how: str) -> None:
    """They are the reference's, and change no bit of the rest."""

    def whole(problem: Problem, operands: Operands, statistics: Statistics) -> Result:
        return forward(problem, operands, BLOCKS[0], statistics)

    check_statistics(*_call(case, "items"), whole)


def _edges(*shape: int) -> Tensor:
    """Numbers of which a quarter are the largest, the least, the least with all digits, or 0."""
    numbers = torch.randn(shape).to(FLOAT8).float()
    edges = torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-9), 2.0**-6, 0.0])
    chosen = edges[torch.randint(0, len(edges), shape)]
    return torch.where(torch.rand(shape) < 0.25, chosen, numbers).to(FLOAT8)


@pytest.mark.parametrize("scale", [1e-5, 0.1])
def test_numbers_at_the_edge(scale: float, how: str) -> None:
    """448 and -448, and the subnormals; large scores make a softmax of one key."""
    torch.manual_seed(0)
    q, k, v = _edges(1, 2, 37, 16), _edges(1, 2, 45, 16), _edges(1, 2, 45, 16)
    problem, operands = _of(q, k, v, scale, Scales(torch.tensor(0.5), None, torch.tensor([3e-3])))
    _check(problem, operands, BLOCKS[0])


def _of(q: Tensor, k: Tensor, v: Tensor, scale: float, scales: Scales) -> tuple[Problem, Operands]:
    problem = tilewise.plan(q, k, v, scale=scale, backend="tiled").problem
    return problem, with_scales(Operands(q, k, v), scales, problem)


FEW = [
    Case("one", **{**SMALL, "queries": 1, "keys": 130}, **GQA),
    Case("some", **{**SMALL, "queries": 5, "keys": 77}, **GQA, mask=("causal",), sinks=True),
    Case("dead", **{**SMALL, "queries": 16, "keys": 9}, mask=("causal",)),
    Case("one-split", **{**SMALL, "queries": 3, "keys": 31}, **GQA, score=("softcap_tight",)),
]


@_turns(FEW)
def test_few_queries(case: Case, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the road of decoding, in several splits: rows of heads with scales of their own."""
    monkeypatch.setattr(Config, "splitting", lambda _: SHORT)
    for kind in ("items", "none"):
        problem, operands = _call(case, kind)
        got = decode(problem, operands, "top1")
        _check_result(got, problem, operands, ("out", "lse", "max_logit", "entropy"))


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_in_pages(packed: bool, page_size: int, how: str) -> None:
    """By the public call: few queries, and packed ones; against the reference."""
    torch.manual_seed(6)
    lengths = torch.tensor([20, 0, 33])
    slots = 33 // page_size + 1
    table = torch.randperm(3 * slots).view(3, slots).int()
    k, v = (torch.randn(3 * slots, 2, page_size, 16).to(FLOAT8) for _ in range(2))
    q = torch.randn((47, 4, 16) if packed else (3, 4, 5, 16)).to(FLOAT8)
    cu = torch.tensor([0, 20, 22, 47]) if packed else None
    call: dict[str, Any] = {"mask": masks.causal(), "return_lse": True}
    call |= {"q_scale": torch.rand(3, 4) - 0.5, "k_scale": torch.rand(2), "v_scale": torch.ones(1)}
    found = [
        tilewise.attention_paged(q, k, v, table, lengths, cu, backend=backend, **call)
        for backend in ("gpu", "tiled")
    ]
    torch.testing.assert_close(found[0].lse, found[1].lse)
    torch.testing.assert_close(found[0].out, found[1].out, rtol=0.02, atol=0.005)
    assert found[0].out.dtype is torch.bfloat16


def test_every_number_is_itself(how: str) -> None:
    """All 256 codes as values that one key each has all the weight of; NaN stays NaN."""
    v = torch.arange(256, dtype=torch.uint8).view(FLOAT8).reshape(1, 1, 16, 16)
    q, k = torch.zeros(1, 1, 16, 16).to(FLOAT8), torch.zeros(1, 1, 16, 16).to(FLOAT8)
    mask = torch.eye(16, dtype=torch.bool)
    finite = torch.where(v.float().isnan(), torch.zeros(()), v.float()).to(FLOAT8)
    out = tilewise.attention(q, k, finite, mask=mask, backend="gpu")
    assert torch.equal(out.float(), finite.float())
    # A row of the block that holds a NaN multiplies it by 0: all of that column is NaN.
    out = tilewise.attention(q, k, v, backend="gpu")
    assert torch.equal(out.isnan().all(2), v.float().isnan().any(2))


@pytest.mark.parametrize(("q_scale", "k_scale"), [(-1.0, 1.0), (0.0, 2.0), (1e-38, 1e-38)])
def test_scales_that_are_not_positive(q_scale: float, k_scale: float, how: str) -> None:
    """Without a score their product would be part of the exponent, which wants it positive."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 40, 16).to(FLOAT8) for _ in range(3))
    scales = Scales(torch.tensor([q_scale, 1.0]), torch.tensor(k_scale))
    problem, operands = _of(q, k, v, 0.25, scales)
    _check(problem, operands, BLOCKS[1], "top1")
    _check(problem._replace(mask=masks.causal().program), operands, BLOCKS[2])


@pytest.mark.parametrize("of", ["q_scale", "k_scale"])
def test_a_scale_that_is_no_number_shows(of: str, how: str) -> None:
    """In its head and in no other; a row without keys stays 0."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 2, n, 16).to(FLOAT8) for n in (50, 40, 40))
    keywords: dict[str, Any] = {"mask": masks.causal(), "backend": "gpu", "return_lse": True}
    good = tilewise.attention(q, k, v, **keywords)
    keywords[of] = torch.tensor([math.nan, 1.0])
    bad = tilewise.attention(q, k, v, **keywords)
    assert bool((bad.out[:, 0, :10] == 0).all())
    assert bool((bad.lse[:, 0, :10] == -math.inf).all())
    assert bool(bad.out[:, 0, 10:].isnan().all())
    assert bool(bad.lse[:, 0, 10:].isnan().all())
    assert_same_bits(bad.out[:, 1], good.out[:, 1], "the other head")


def test_keys_that_are_excluded_may_be_nan(how: str) -> None:
    """Beyond a length, in the future of a whole tile, and in a tile that a document leaves out."""
    torch.manual_seed(3)
    qkv = [torch.randn(2, 1, 70, 16).to(FLOAT8) for _ in range(3)]
    ids = (torch.arange(70) >= 64).long()
    for mask, where in (
        (masks.lengths(torch.tensor([41, 70])), (0, slice(None), slice(41, None))),
        (masks.causal(), (slice(None), slice(None), slice(64, None))),
        (masks.document(ids), (slice(None), slice(None), slice(64, None))),
    ):
        check_hidden(mask, qkv, where, slice(64), ("kv",))


def test_sequences_keep_their_bits_in_any_company(how: str) -> None:
    """Packed after others at places that no 16 divides, and alone."""
    torch.manual_seed(4)
    counts = torch.tensor([0, 35, 36, 106])
    q, k, v = (torch.randn(106, 2, 16).to(FLOAT8) for _ in range(3))
    keywords: dict[str, Any] = {"mask": masks.causal(), "backend": "gpu"}
    scale = torch.rand(3, 2) + 0.5
    whole = tilewise.attention_varlen(q, k, v, counts, counts, k_scale=scale, **keywords)
    for i, (begin, end) in enumerate(counts.unfold(0, 2, 1).tolist()):
        cu = torch.tensor([0, end - begin])
        a, b, c = (x[begin:end].clone() for x in (q, k, v))
        alone = tilewise.attention_varlen(a, b, c, cu, cu, k_scale=scale[i : i + 1], **keywords)
        assert_same_bits(alone, whole[begin:end], f"sequence {i}")


def test_probabilities_are_raised(how: str) -> None:
    """1000 keys of equal weight each weigh less than e4m3's least number, and yet count."""
    q = torch.zeros(1, 1, 3, 16).to(FLOAT8)
    k = torch.zeros(1, 1, 1000, 16).to(FLOAT8)
    k[:, :, 0, 0] = 1.0
    q[..., 0] = 7.0
    v = torch.ones(1, 1, 1000, 16).to(FLOAT8)
    v[:, :, 0] = 0.0
    out = tilewise.attention(q, k, v, scale=1.0, backend="gpu")
    expected = 999 / (999 + math.exp(7.0))
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=0.03, atol=0)


def test_what_is_launched(how: str) -> None:
    """Values are turned round before the walk where the products are of float8, and not else."""
    problem, operands = _call(CASES[0], "heads")
    config = Config("interpreter", overrides=(("forward", BLOCKS[0]),))
    _, todo = prepare_forward(problem, operands, config)
    assert len(todo) == (1 if how == "halves" else 2)
    walk = todo[-1]
    assert walk.arguments["call"].inputs[0].dtype is (torch.uint8 if how == "halves" else FLOAT8)
    assert walk.arguments["call"].per_head[1].shape == (problem.batch, problem.heads)
    assert walk.constants["FORM"].FOLDED is True


def test_a_capped_score_and_a_table(how: str) -> None:
    """By the public call, against the reference."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 2, 70, 16).to(FLOAT8) for _ in range(3))
    mask = tilewise.BlockMask.of(masks.window(20, 3), 70, block=(32, 32), dtype=FLOAT8)
    keywords: dict[str, Any] = {"mask": mask, "score": scores.softcap(2.0), "return_lse": True}
    got = tilewise.attention(q, k, v, **keywords, q_scale=torch.tensor(-2.0), backend="gpu")
    wanted = tilewise.attention(q, k, v, **keywords, q_scale=torch.tensor(-2.0), backend="tiled")
    torch.testing.assert_close(got.lse, wanted.lse)
    torch.testing.assert_close(got.out, wanted.out, rtol=0.1, atol=0.05)


def test_incoherent_queries_and_keys(how: str) -> None:
    """Operands as ``tilewise.float8`` gives them, with an outlier in the keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 24) for n in (37, 45, 45))
    k[..., 3] *= 30
    rounded = float8.quantised(q, k, v, incoherent_qk=True)
    scales = Scales(*rounded[3:])
    problem, operands = _of(rounded.q, rounded.k, rounded.v, 24**-0.5, scales)
    _check(problem, operands, BLOCKS[0])
