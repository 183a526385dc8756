"""Expressions in the core: masks, scores, and the gradients of what they load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS, Case, build
from tests.contract import assert_same_bits
from tests.kernels.cpu.expressed import as_mask, as_score, case_of, check, learned
from tests.kernels.targets import CPU_TARGETS, Target, only_cpu
from tests.kernels.test_threads import check_threads
from tests.oracle import assert_same, send
from tests.oracle import attend as attended
from tests.plain import attend
from tests.variants.drawn import program_of
from tilelab.cases.variants import Draw
from tilewise import masks, scores
from tilewise.errors import Unsupported
from tilewise.variants.expr import Expr, Graph
from tilewise.variants.values import Mask, Score

_GENERATOR = torch.Generator().manual_seed(3)
DOCUMENTS = torch.arange(1500) // 23
BLOCKS = torch.rand(4, 60, 100, generator=_GENERATOR) < 0.4
LENGTHS = torch.tensor([31, 140, 0, 66])


def _relative(drawn: Draw) -> Any:
    table = learned(drawn, 4, 3000)
    return lambda s, b, h, m, n: s + table[h, m - n + 1500]


def _decay(drawn: Draw) -> Any:
    slopes = learned(drawn, 4)
    return lambda s, b, h, m, n: s * torch.exp(-0.01 * slopes[h] * (m - n).abs())


def _capped(drawn: Draw) -> Any:
    bias = learned(drawn, 4, 1500)
    return lambda s, b, h, m, n: 5.0 * torch.tanh(s / 5.0) + bias[b, n]


def _parted(drawn: Draw) -> Any:
    by_query, by_key = learned(drawn, 1500), learned(drawn, 4, 5)
    return lambda s, b, h, m, n: torch.where(
        (m // 16) % 2 == 0, s * by_query[m], s + by_key[h, n % 5]
    )


def _twice(drawn: Draw) -> Any:
    weights, one = learned(drawn, 1500), learned(drawn, 1)
    return lambda s, b, h, m, n: s * torch.sigmoid(weights[m] + weights[n]) + one[b - b]


def _bent(_: Draw) -> Any:
    return lambda s, b, h, m, n: (
        torch.sign(s) * torch.log(1.0 + s.abs()) + torch.sin(s * (m - n) * 0.1)
    )


def _gated(drawn: Draw) -> Any:
    gate = learned(drawn, *drawn.sizes)
    return lambda s, b, h, m, n: s * gate[b, h, m, n] + gate[b, h, m, 0]


def _crossed(drawn: Draw) -> Any:
    table = learned(drawn, 4, 4)
    return lambda s, b, h, m, n: s * table[b, h] + table[h, b]


def _hashed(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m * 7 + n * 13) % 5 < 2


def _wide(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m * 2**33 + n * 2**31) % 3 != 0


# The maker of a score, and a mask.
VARIANTS: dict[str, tuple[Any, Any]] = {
    "relative": (_relative, None),
    "decay": (_decay, lambda b, h, m, n: m + 80 >= n),
    "capped": (_capped, lambda b, h, m, n: (n < LENGTHS[b]) | (n == 2)),
    "parted": (_parted, lambda b, h, m, n: DOCUMENTS[m] == DOCUMENTS[n]),
    "twice": (_twice, _hashed),
    "bent": (_bent, _wide),
    "gated": (_gated, lambda b, h, m, n: (m + n) % 7 > 0),
    "crossed": (_crossed, None),
    "blocks": (None, lambda b, h, m, n: BLOCKS[h, m // 32, n // 16]),
    "floats": (None, lambda b, h, m, n: torch.sin(0.3 * m) * torch.cos(0.2 * n) > -0.2),
}
PACKED: dict[str, Any] = {"sequences": ((70, 150), (1, 33), (65, 64), (130, 17))}
GRADED = [name for name in VARIANTS if name not in ("bent", "blocks", "floats")]


def variant(name: str, dtype: torch.dtype, **sizes: Any) -> Case:
    """A case of a variant."""
    return case_of(name, *VARIANTS[name], **sizes, dtype=dtype)


def _pairs() -> list[Any]:
    """Every variant in every dtype; all but a sample are slow below the best instruction set."""
    return [
        pytest.param(
            target,
            name,
            dtype,
            marks=() if target.rank == 0 or (i + j) % 4 == target.rank else (pytest.mark.slow,),
            id=f"{target}-{name}-{dtype}",
        )
        for target in CPU_TARGETS
        for i, name in enumerate(VARIANTS)
        for j, dtype in enumerate(FLOATS)
    ]


@pytest.mark.parametrize(("target", "name", "dtype"), _pairs(), indirect=["target"])
def test_exact(target: Target, name: str, dtype: torch.dtype) -> None:
    check(variant(name, dtype))


@pytest.mark.parametrize(("target", "name", "dtype"), _pairs()[::3], indirect=["target"])
def test_packed(target: Target, name: str, dtype: torch.dtype) -> None:
    """Sequences of unequal lengths: b is the sequence, m and n count within it."""
    check(variant(name, dtype, **PACKED))


@only_cpu
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (0, 5), (3, 0), (64, 16), (65, 129)])
def test_sizes(target: Target, queries: int, keys: int) -> None:
    """One row, no row, no key; whole tiles and odd ones."""
    dtype = FLOATS[(queries + target.rank) % 4]
    check(variant("relative", dtype, queries=queries, keys=keys))
    check(variant("parted", dtype, queries=queries, keys=keys, kv_heads=1))


@only_cpu
def test_dropout(target: Target) -> None:
    """Dropped pairs have no share in the gradient of what is loaded."""
    check(variant("relative", torch.float32, dropout_p=0.3))
    check(variant("parted", torch.bfloat16, dropout_p=0.3))


@only_cpu
def test_threads(target: Target) -> None:
    """Bits depend on no number of threads: several chunks of keys, few heads, many tiles."""
    long = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 400, "keys": 1300}
    many = {"batch": 3, "kv_heads": 4, "queries": 140, "keys": 200}
    for index, name in enumerate(GRADED):
        dtype = FLOATS[(index + target.rank) % 4]
        check_threads(variant(name, dtype, **(long if index % 2 else many)), (2, 3))


# The last operations of a score, which the interpreter does in one pass with the scaling.
ENDS = {
    "plus": lambda s, b, h, m, n: s + 0.015625 * (m + n),
    "plus what is of the key": lambda s, b, h, m, n: 0.25 * (n % 7) + s,
    "minus": lambda s, b, h, m, n: s - 0.015625 * (m - n),
    "taken from": lambda s, b, h, m, n: 0.015625 * (m - n) - s,
    "times": lambda s, b, h, m, n: s * (1 + 0.015625 * (m - n).abs()),
    "squared": lambda s, b, h, m, n: s * s,
    "window": lambda s, b, h, m, n: torch.where((m - n < 40) & (n - m < 90), s, -torch.inf),
    "hidden": lambda s, b, h, m, n: torch.where((m + n) % 3 == 0, -torch.inf, s),
    "deep": lambda s, b, h, m, n: torch.where((m + n) % 3 == 0, s, -3e38 + s),
    "deep sum": lambda s, b, h, m, n: s + torch.where(n > m, -3e38, 0.0),
    "capped": lambda s, b, h, m, n: 3 * torch.tanh(s * 0.75),
    "capped by a quotient": lambda s, b, h, m, n: torch.tanh(s / 0.75) * 3,
    "capped far": lambda s, b, h, m, n: 12 * torch.tanh(s * 4),
    "tanh": lambda s, b, h, m, n: torch.tanh(s + 0.015625 * n),
    "gated": lambda s, b, h, m, n: 5 * torch.sigmoid(s * 2),
    "exponential": lambda s, b, h, m, n: torch.exp(0.5 * s),
    "of both": lambda s, b, h, m, n: torch.exp(0.5 * s) - s,
    "twice": lambda s, b, h, m, n: (s - torch.maximum(s, s * 0)) * 50 + s,
    "bands": lambda s, b, h, m, n: torch.where(
        (m - n) % 5 < 3, s * 2, torch.where(n + 7 - m > 3, s + (n + 7 - m) * 0.015625, s)
    ),
}


@only_cpu
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_ends(target: Target, name: str, dtype: torch.dtype) -> None:
    """Each with rows and keys that fill no vector and no piece."""
    check(case_of(name, lambda _: ENDS[name], queries=135, dtype=dtype))


@only_cpu
def test_tanh_near_and_far(target: Target) -> None:
    """Both of its forms, and what lanes get that have neighbours of the other kind."""
    values = torch.cat([torch.linspace(-1.2, 1.2, 60), torch.tensor([0.0, 1e-30, 40.0, -40.0])])
    q = torch.zeros(1, 1, 64, 4)
    q[0, 0, :, 0] = values
    k = torch.ones(1, 1, 1, 4)

    def lse(x: Tensor) -> Tensor:
        score = as_score(lambda s, b, h, m, n: 2 * torch.tanh(s * 1.0))
        found = tilewise.attention(
            x, k, k, score=score, scale=1.0, backend="cpu", return_lse=True
        ).lse
        assert found is not None
        return found[0, 0]

    together = lse(q)
    expected = (2 * torch.tanh(values.double())).float()
    torch.testing.assert_close(together, expected, rtol=4e-7, atol=0)
    alone = torch.cat([lse(q[:, :, i : i + 1]) for i in range(64)])
    assert_same_bits(together, alone, "lse")


@only_cpu
def test_later_steps(target: Target) -> None:
    """An expression, a cap behind it, and a bias behind that: each gradient of its own step."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    table = torch.randn(2, 80, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 2, 1, 40, dtype=torch.float64, requires_grad=True)
    first = as_score(lambda s, b, h, m, n: s * table[h, m - n + 40])
    leaves = [q, k, v, table, bias]
    score = [first, scores.softcap(3.0), scores.bias(bias)]
    out = tilewise.attention(q, k, v, score=score, mask=masks.causal(), backend="cpu")

    def whole(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return 3 * torch.tanh(s * table[h, m - n + 40] / 3) + bias

    expected = attend(q, k, v, score=whole, mask=lambda b, h, m, n: n <= m).out
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        rtol=1e-11,
        atol=1e-12,
    )


@only_cpu
def test_gradient_of_the_entropy(target: Target) -> None:
    """It reaches what an expression loads as it reaches a bias."""
    torch.manual_seed(6)
    q, k, v = (torch.randn(1, 2, 150, 8, dtype=torch.float64) for _ in "qkv")
    table = torch.randn(2, 300, dtype=torch.float64, requires_grad=True)

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * table[h, m - n + 150]

    words: dict[str, Any] = {"backend": "cpu", "return_stats": True}
    result = tilewise.attention(q, k, v, score=as_score(score), **words)
    (expected,) = torch.autograd.grad(attend(q, k, v, score=score).entropy.sum(), table)
    assert result.stats is not None
    (got,) = torch.autograd.grad(result.stats.entropy.sum(), table)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def _assert_finite(case: Case) -> None:
    inputs = build(case)
    found = attended(inputs, "cpu", send(inputs))
    for result in (found.out, found.lse, *found.grads.values()):
        assert bool(result.isfinite().all())


@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_in_hidden_pairs(target: Target, dtype: torch.dtype) -> None:
    """What an expression makes of a hidden pair is never seen, forward or backward."""

    def undefined(drawn: Draw) -> Any:
        weights = learned(drawn, 1500)
        return lambda s, b, h, m, n: s + torch.log(m - n + 1.0) * weights[m] / (m - n + 1)

    case = case_of("hidden", undefined, lambda b, h, m, n: n <= m, queries=77, keys=77, dtype=dtype)
    _assert_finite(case)


@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lanes_without_a_query(target: Target, dtype: torch.dtype) -> None:
    """A tile's last lanes may hold no query: what is made of their zeros stays there."""

    def logarithmic(drawn: Draw) -> Any:
        weights = learned(drawn, 4)
        return lambda s, b, h, m, n: weights[h] * s * torch.log(s.abs())

    _assert_finite(case_of("logarithmic", logarithmic, queries=71, dtype=dtype))


@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_that_only_evaluation_finds_hidden(target: Target, dtype: torch.dtype) -> None:
    """A piece whose pairs all turn out hidden is not read, whatever its keys hold."""
    mask = lambda b, h, m, n: ((n ^ 5) < 96) & (n <= m + 90)  # noqa: E731
    inputs = build(case_of("odd", mask=mask, keys=128, dtype=dtype))
    sent = send(inputs)
    clean = attended(inputs, "cpu", sent)
    with torch.no_grad():
        inputs.k[:, :, 96:] = torch.nan
        inputs.v[:, :, 96:] = torch.nan
    assert_same(attended(inputs, "cpu", sent), clean)
    assert bool((clean.grads["k"][:, :, 96:] == 0).all())


@only_cpu
def test_indices_are_clamped(target: Target) -> None:
    """An index outside of its tensor reads the nearest element; nothing reads an empty tensor.

    A captured mask decides which pairs attend: without it the calls were refused.
    """
    everything = torch.ones(40, dtype=torch.bool)
    mask = as_mask(lambda b, h, m, n: everything[n])
    torch.manual_seed(7)
    table = torch.randn(3, 5).requires_grad_()
    q, k, v = (torch.randn(2, 2, 40, 8) for _ in "qkv")
    out = tilewise.attention(
        q,
        k,
        v,
        mask=mask,
        score=as_score(lambda s, b, h, m, n: s + table[h + 2, m - n]),
        backend="cpu",
    )
    picked = lambda s, b, h, m, n: s + table[2, (m - n).clamp(0, 4)]  # noqa: E731
    expected = attend(q, k, v, score=picked).out
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    got, right = (torch.autograd.grad(x, table, torch.ones_like(x))[0] for x in (out, expected))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    empty = torch.zeros(0, 3)
    same = tilewise.attention(
        q, k, v, mask=mask, score=as_score(lambda s, b, h, m, n: s + empty[m, n]), backend="cpu"
    )
    torch.testing.assert_close(same, tilewise.attention(q, k, v, backend="cpu"))


@only_cpu
def test_lowest_numbers_as_masks(target: Target) -> None:
    """The lowest float is a mask in disguise, yet a row of nothing else is a row with keys."""
    lowest = torch.finfo(torch.float32).min
    q, k, v = (torch.randn(1, 1, 20, 8, requires_grad=True) for _ in "qkv")
    score = as_score(lambda s, b, h, m, n: torch.where((n <= m) & (m > 0), s, lowest))
    out, lse = tilewise.attention(q, k, v, score=score, backend="cpu", return_lse=True)[:2]
    torch.testing.assert_close(out[:, :, 0], v.mean(2))
    causal = tilewise.attention(q, k, v, mask=masks.causal(), backend="cpu")
    torch.testing.assert_close(out[:, :, 1:], causal[:, :, 1:])
    assert lse[0, 0, 0].item() == pytest.approx(lowest, rel=1e-6)


def _reason(expr: Expr, *tensors: Tensor) -> str:
    q, score = torch.randn(1, 1, 3, 4), Score(program_of(expr), tensors)
    with pytest.raises(Unsupported) as caught:
        tilewise.attention(q, q, q, score=score, backend="cpu")
    return str(caught.value)


def test_limits() -> None:
    """Each limit is a reason why not, by name."""
    if not CPU_TARGETS:
        pytest.skip("the compiled core is not built")
    graph = Graph()
    value = graph.leaf("s")
    for i in range(150):
        value = graph.apply("add", value, graph.constant(float(i + 2)))
    assert "301 nodes; its limit is 256" in _reason(graph.expr(value))
    graph = Graph()
    value = graph.leaf("s")
    for i in range(17):
        value = graph.apply("add", value, graph.load("float", 0, [graph.constant(i)]))
    assert "17 elements that it loads; its limit is 16" in _reason(
        graph.expr(value), torch.randn(20)
    )
    graph = Graph()
    load = graph.load("float", 0, [graph.leaf("m")] * 7)
    assert "7 dimensions in a tensor that it loads; its limit is 6" in _reason(
        graph.expr(graph.apply("add", graph.leaf("s"), load)), torch.randn([1] * 7)
    )


def test_the_core_checks_what_it_is_given() -> None:
    """Nothing that is no expression reaches a kernel."""
    core = pytest.importorskip("tilewise._core")
    kernel = core.Kernel(0, (1, 1, 1, 3, 3, 4, 4), 1.0, 0.0, False)
    s, m = ("s", (), None), ("m", (), None)
    with pytest.raises(ValueError, match="no operation of an expression is called 'nothing'"):
        kernel.add_score_expr((("nothing", (), None),), (0,), ())
    with pytest.raises(ValueError, match="node 2 has arguments"):
        kernel.add_score_expr((s, m, ("add", (0, 1), None)), (2,), ())
    with pytest.raises(ValueError, match="later argument"):
        kernel.add_score_expr((("neg", (0,), None),), (0,), ())
    with pytest.raises(ValueError, match="slot 1 of 1"):
        kernel.add_score_expr((m, ("load_float", (0,), 1)), (1,), (0,))
    with pytest.raises(ValueError, match="one output, a float"):
        kernel.add_score_expr((m,), (0,), ())
    with pytest.raises(ValueError, match="one output, a boolean"):
        kernel.add_mask_expr((m,), (0,), ())
    with pytest.raises(ValueError, match="knows no score"):
        kernel.add_mask_expr((s, ("lt", (0, 0), None)), (1,), ())
    with pytest.raises(ValueError, match="a value that it should not have, or none"):
        kernel.add_mask_expr((("const_bool", (), None),), (0,), ())
    with pytest.raises(ValueError, match="no mask operation is called 'expr'"):
        kernel.add_mask("expr", False, 0, 0, False, 0, -1, -1)
    kernel.add_score("softcap", 3.0, -1)
    with pytest.raises(ValueError, match="first step"):
        kernel.add_score_expr((s,), (0,), ())


@only_cpu
def test_composed_masks(target: Target) -> None:
    """Expressions among other leaves and connectives."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 2, 150, 8) for _ in "qkv")
    mask = (masks.causal() & as_mask(_hashed)) | ~as_mask(lambda b, h, m, n: (m ^ n) % 4 < 3)
    m, n = torch.arange(150)[:, None], torch.arange(150)
    dense = ((n <= m) & _hashed(0, 0, m, n)) | ~((m ^ n) % 4 < 3)
    got = tilewise.attention(q, k, v, mask=mask, backend="cpu")
    expected = tilewise.attention(q, k, v, mask=dense, backend="cpu")
    torch.testing.assert_close(got, expected)
    assert isinstance(mask, Mask)
