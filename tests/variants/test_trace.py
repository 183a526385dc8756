"""Python functions as expressions: what they say, and what is refused with its line."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tilewise
from tests.cases import drawn
from tests.variants.drawn import Extents, run
from tilewise.errors import InvalidArgument, InvalidType, TilewiseError
from tilewise.variants.expr import Expr, Graph, decode, encode, kinds
from tilewise.variants.trace import trace_mask, trace_score

B, H, M, N = 2, 3, 5, 7
IDS = torch.tensor([[0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2, 3]])
TABLE = drawn(H, 16, dtype=torch.float64)
FACTOR = torch.tensor(1.5, dtype=torch.float64)
OFFSET = torch.tensor(2)


def positions() -> tuple[torch.Tensor, ...]:
    return torch.meshgrid(*map(torch.arange, (B, H, M, N)), indexing="ij")


def drawn_scores() -> torch.Tensor:
    return drawn(B, H, M, N, seed=1, dtype=torch.float64)


def value(expr: Expr, captured: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return run(expr, captured, extents=Extents(B, H, M, N), s=drawn_scores())[0]


SCORES: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda s, b, h, m, n: 2 * s - (m + 1) / (n + 2) + 3 - h * b,
    "reflected": lambda s, b, h, m, n: 1 - (2 / (1 + s * s)) + 7 // (m + 1) + 9 % (n + 1),
    "floor": lambda s, b, h, m, n: (m - n) // 3 + (m - n) % 3 + s // 0.5 + s % 0.75,
    "powers": lambda s, b, h, m, n: s**2 + s**3 + (m + 1) ** 2 + (n + 1) ** 0.5 + abs(s) ** 1.5,
    "inverse powers": lambda s, b, h, m, n: (n + 1.0) ** -1 + (n + 1.0) ** -2 + (n + 2.0) ** -0.5,
    "an inverse square": lambda s, b, h, m, n: (1e-100 * (s + 9)) ** -2 * 1e-200 + (s * 1e90) ** -2,
    "power of a value": lambda s, b, h, m, n: 2.0 ** (-0.1 * m) + (n + 1.0) ** (0.5 * s),
    "unary": lambda s, b, h, m, n: -s + abs(m - n) + (+s) - abs(-s),
    "min and max": lambda s, b, h, m, n: min(s, m, 2) + max(n - m, 0) * min([n, 3]),
    "functions": lambda s, b, h, m, n: torch.exp(s) + torch.tanh(s).sigmoid() + s.sin() * s.cos(),
    "logarithms": lambda s, b, h, m, n: torch.log(n + 1) + torch.log2(m + 1.0) + s.exp2(),
    "roots": lambda s, b, h, m, n: torch.sqrt(m) + torch.rsqrt(n + 1) + s.square(),
    "rounding": lambda s, b, h, m, n: torch.floor(s) + s.ceil() + torch.round(s) + s.trunc(),
    "clamp": lambda s, b, h, m, n: s.clamp(-0.5, 0.5) + torch.clamp(m - n, min=0),
    "where": lambda s, b, h, m, n: torch.where(m < n, s, tilewise.where(h == 1, m, 0.5)),
    "where as a method": lambda s, b, h, m, n: s.where(m < n, 0.5) + (m + 1).where(h == 1, s),
    "where of a tensor": lambda s, b, h, m, n: s * FACTOR.where(m < n, s),
    "infinite powers": lambda s, b, h, m, n: (0.5 + 0 * s) ** math.inf + (m < n) ** -math.inf,
    "powers of numpy": lambda s, b, h, m, n: s ** np.int64(2) + m ** np.int64(3),
    "extremes": lambda s, b, h, m, n: torch.minimum(s, m) + tilewise.maximum(s, n),
    "activations": lambda s, b, h, m, n: torch.relu(s) + torch.nn.functional.softplus(s),
    "a small softplus": lambda s, b, h, m, n: torch.nn.functional.softplus(9 * s - 40).log(),
    "division": lambda s, b, h, m, n: torch.div(m, n + 1, rounding_mode="floor") + s.div(3),
    "casts": lambda s, b, h, m, n: s.long() + m.float() / 2 + (s > 0).to(torch.int64) + (m < n),
    "bits": lambda s, b, h, m, n: ((m ^ n) & 3) + (m << 2) + (n >> 1) + ~m + (m | 4),
    "logic": lambda s, b, h, m, n: s + ((m < n) ^ (n != 2)) + torch.logical_not(m == n),
    "table": lambda s, b, h, m, n: s + TABLE[h, m - n + 7],
    "scalar tensors": lambda s, b, h, m, n: FACTOR * s + s * FACTOR - (m + OFFSET) + OFFSET * n,
    "tensor of a tensor": lambda s, b, h, m, n: s * TABLE[h, IDS[b, n]],
    "torch on a captured tensor": lambda s, b, h, m, n: s + (TABLE * 2).exp()[h, m],
    "lengths": lambda s, b, h, m, n: s * (n.length - m.length) + m.length,
    "sum of a list": lambda s, b, h, m, n: sum([s, m, n]),
    "reduce": lambda s, b, h, m, n: functools.reduce(operator.mul, [s, s, s]),
    "infinity": lambda s, b, h, m, n: torch.where((m + n) % 2 == 0, s, -math.inf),
    "a constant": lambda s, b, h, m, n: 3.0,
}
MASKS: dict[str, Callable[..., Any]] = {
    "comparisons": lambda b, h, m, n: (m < n) | (m >= n + 2) | (n == 3) | (m != 4) & (n > 1),
    "documents": lambda b, h, m, n: (IDS[b, m] == IDS[b, n]) & (n <= m + n.length - m.length),
    "negation": lambda b, h, m, n: ~(m <= n) & ~((n % 2) == 0),
    "shuffled": lambda b, h, m, n: ((m * 7 + n * 13 + h * 5) % 11) < 4,
    "logical": lambda b, h, m, n: torch.logical_and(m > 0, torch.logical_or(n < 3, h)),
    "boolean": lambda b, h, m, n: (IDS == 2)[b, n],
    "a sum of booleans": lambda b, h, m, n: ((m < n) + (n > 3)) == 1,
    "a product of booleans": lambda b, h, m, n: ~((m < n) * (n > 3)),
    "extremes of booleans": lambda b, h, m, n: torch.minimum(m < n, torch.maximum(n > 3, h == 1)),
    "booleans that are counted": lambda b, h, m, n: sum([m < n, n > 3, h == 1]) == 2,
    "new values": lambda b, h, m, n: (
        m.new_ones((), dtype=torch.bool).to(m.device) & (n < m + n.new_ones(()))
    ),
    "new values of a shape": lambda b, h, m, n: (
        IDS[b, m.new_zeros(m.shape)] + n.new_empty(n.shape) * 0 + m.new_full((), 2) < m
    ),
    "new values like others": lambda b, h, m, n: (
        torch.ones_like(b, dtype=torch.bool) & (torch.full_like(m, 3) + torch.empty_like(n) * 0 < n)
    ),
    "new zeros": lambda b, h, m, n: m.new_zeros((), dtype=torch.bool) | (n < m),
    "what always holds": lambda b, h, m, n: (m >= 0) & (n > -1) & ~(b < 0) & (n <= m),
    "everything": lambda b, h, m, n: True,
    "nothing": lambda b, h, m, n: False,
}


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    """Torch divides integers in its default type; ours are computed in that of the scores."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def meant(function: Callable[..., Any], first: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The same function of real tensors: what torch says it is."""

    class Position(torch.Tensor):
        """Positions know their number."""

        length: int

    b, h, m, n = positions()
    sized = [x.as_subclass(Position) for x in (m, n)]
    sized[0].length, sized[1].length = M, N
    found = function(*first, b, h, *sized)
    return torch.as_tensor(found).as_subclass(torch.Tensor).expand(B, H, M, N)


@pytest.mark.parametrize("name", [name for name in SCORES if name != "min and max"])
def test_a_score_means_what_torch_computes(name: str) -> None:
    expr, captured = trace_score(SCORES[name])
    expected = meant(SCORES[name], (drawn_scores(),)).to(torch.float64)
    torch.testing.assert_close(value(expr, captured), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", ["min", "max"])
def test_a_bound_that_is_nan(side: str) -> None:
    bounds = torch.tensor([0.5, math.nan, -0.5], dtype=torch.float64)
    expr, captured = trace_score(lambda s, b, h, m, n: s.clamp(**{side: bounds[n % 3]}))
    due = drawn_scores().clamp(**{side: bounds[torch.arange(N) % 3]})
    assert torch.equal(value(expr, captured).isnan(), due.isnan())
    torch.testing.assert_close(value(expr, captured), due, equal_nan=True)
    fixed, _ = trace_score(lambda s, b, h, m, n: s.clamp(-1.0, 1.0))
    assert "eq" not in [node.op for node in fixed.nodes]


def test_indices_may_come_one_after_the_other() -> None:
    apart = trace_score(lambda s, b, h, m, n: s + TABLE[h][n])
    assert apart == trace_score(lambda s, b, h, m, n: s + TABLE[h, n])


def test_pythons_min_and_max_are_known() -> None:
    expr, captured = trace_score(SCORES["min and max"])
    s, (_, _, m, n) = drawn_scores(), positions()
    smallest = torch.minimum(torch.minimum(s, m), torch.tensor(2))
    expected = smallest + (n - m).clamp(min=0) * n.clamp(max=3)
    torch.testing.assert_close(value(expr, captured), expected, rtol=1e-12, atol=1e-12)
    plain, _ = trace_mask(lambda b, h, m, n: (n < min(5, 3)) | (n >= max([1, -7], key=abs)))
    assert plain == trace_mask(lambda b, h, m, n: (n < 3) | (n >= -7))[0]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_means_what_torch_computes(name: str) -> None:
    expr, captured = trace_mask(MASKS[name])
    assert torch.equal(value(expr, captured), meant(MASKS[name], ()))


@pytest.mark.parametrize("function", [*SCORES.values(), *MASKS.values()], ids=[*SCORES, *MASKS])
def test_text_and_back(function: Callable[..., Any]) -> None:
    trace = trace_score if function in SCORES.values() else trace_mask
    expr, captured = trace(function)
    assert decode(encode(expr)) == expr
    assert len(kinds(expr)) == len(expr.nodes)
    assert trace(function)[0] == expr
    slots = {x.value for x in expr.nodes if x.op.startswith("load_")}
    assert slots == set(range(len(captured)))


def test_functions_with_the_same_meaning_are_the_same_expression() -> None:
    def windowed(width: int) -> Callable[..., Any]:
        return lambda b, h, m, n: (n <= m) & (m - n < width)

    def spelled(b: Any, h: Any, row: Any, key: Any) -> Any:
        near = row - key < 2 * 4
        return (key <= row) & near

    assert trace_mask(windowed(8)) == trace_mask(windowed(8)) == trace_mask(spelled)
    assert trace_mask(windowed(8)) != trace_mask(windowed(9))


def test_a_folded_zero_keeps_its_sign() -> None:
    graph = Graph()
    zero, two, minus = (graph.constant(each) for each in (0.0, 2.0, -3.0))
    assert graph.apply("mul", zero, minus) == graph.constant(-0.0) != zero
    assert graph.apply("mul", two, minus) == graph.constant(-6.0)


def test_truth_values_are_spelled_as_in_c() -> None:
    expr, _ = trace_mask(lambda b, h, m, n: True)
    assert encode(expr) == "const_bool:true"
    assert decode("const_bool:true") == expr


def test_constants_keep_their_kind_and_their_sign() -> None:
    texts = [
        encode(trace_score(lambda s, b, h, m, n, x=x: s * x)[0])
        for x in (0.0, -0.0, 2, 2.5, -math.inf)
    ]
    assert len(set(texts)) == 5


def test_what_a_function_closes_over_may_change() -> None:
    width = 3

    def near(b: Any, h: Any, m: Any, n: Any) -> Any:
        return abs(m - n) < width

    first = trace_mask(near)
    width = 4
    assert trace_mask(near) != first


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(H, M, N))
        self.unused = torch.nn.Parameter(torch.randn(3))

    def score(self, s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        _ = self.unused[h]
        return s + max(self.bias[h, m, n], 0)

    def forward(self, s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + tilewise.maximum(self.bias[h, m, n], 0)


def test_methods_modules_and_partials_are_functions_too() -> None:
    model = Model()
    expr, captured = trace_score(model.score)
    assert [x is model.bias for x in captured] == [True], "what is not used is not captured"
    assert trace_score(model)[0] == expr
    twice = functools.partial(lambda factor, s, b, h, m, n: factor * s, 2.0)
    assert encode(trace_score(twice)[0]) == "const_float:2.0;s;mul(0,1)"


def test_a_tensor_that_is_read_twice_is_captured_once() -> None:
    _, captured = trace_score(lambda s, b, h, m, n: s + TABLE[h, m] - TABLE[h, n])
    assert [x is TABLE for x in captured] == [True]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a chain": (lambda b, h, m, n: 0 <= m - n < 4, r"'and'.*where.*\(a < b\) & \(b < c\)"),
    "and": (lambda b, h, m, n: m > n and n > 2, r"test_trace.py:\d+: .*m > n and n > 2"),
    "if": (lambda b, h, m, n: n > 2 if h == 0 else n > 1, "tilewise.where"),
    "not": (lambda b, h, m, n: not (m < n), "~ for"),
    "too few indices": (lambda b, h, m, n: IDS[n] == 0, "an index for each of its dimensions"),
    "a bare tensor": (lambda b, h, m, n: n < IDS, "an index for each of its dimensions"),
    "a slice": (lambda b, h, m, n: IDS[b, :][n] == 0, "the index slice"),
    "a negative index": (lambda b, h, m, n: IDS[b, -1] == 0, "negative ones do not wrap"),
    "a float index": (lambda b, h, m, n: IDS[b, n / 2] == 0, "an index that is a float"),
    "a boolean index": (lambda b, h, m, n: IDS[b, n < 2] == 0, "an index that is a bool"),
    "a new tensor": (lambda b, h, m, n: m.new_ones(3) < n, r"a new tensor of size 3"),
    "a new tensor by keyword": (lambda b, h, m, n: m.new_ones(size=(3,)) < n, r"of size 3"),
    "a new full tensor": (lambda b, h, m, n: m.new_full((2, 3), 1) < n, r"of size \(2, 3\)"),
    "too few indices, iterated": (lambda b, h, m, n: sum(IDS[b]) == 0, "an index for each of its"),
    "too few indices, unpacked": (lambda b, h, m, n: (lambda *x: x[0])(*IDS[b]), "an index for"),
    "too few indices of an index": (lambda b, h, m, n: IDS[IDS[b]] == 0, "an index for each of"),
    "too few indices, a function": (
        lambda b, h, m, n: torch.exp(IDS[b]) == 0,
        r"torch.exp of a row of a tensor.*test_trace.py:\d+",
    ),
    "too few indices, a method": (lambda b, h, m, n: IDS[b].float() == 0, "an index for each of"),
    "a list as index": (lambda b, h, m, n: IDS[[b, n]] == 0, r"got the index \[<traced int"),
    "an option": (
        lambda b, h, m, n: torch.add(m, n, alpha=2) == 0,
        "torch.add of a traced value .*'alpha'; required: its operands by position.*test_trace.py",
    ),
    "an option of a method": (
        lambda b, h, m, n: m.round(decimals=1) == 0,
        r"\.round of .*decimals",
    ),
    "a list of values": (lambda b, h, m, n: torch.stack([m < n, n > 3]).any(), "torch.stack of a"),
    "another type": (lambda b, h, m, n: m.to(n) == 0, r"\.to\(<traced int .*dtype, or a torch.dev"),
    "two types": (lambda b, h, m, n: m.to("cpu", torch.long) == 0, r"\.to\(cpu, torch.int64\)"),
    "a key": (lambda b, h, m, n: {0: 1}[h] < n, "used as a key of a dict.*test_trace.py"),
    "another function": (
        lambda b, h, m, n: torch.cumsum(m, 0) < n,
        "got torch.cumsum of .* one of: abs",
    ),
    "another method": (lambda b, h, m, n: m.median() < n, "operators, or one of: abs, "),
    "bits of floats": (lambda b, h, m, n: (m / 2) & 1, "a float as operand of &"),
    "an integer": (lambda b, h, m, n: m - n, "a function that returns an integer.*Compare"),
    "nothing at all": (lambda b, h, m, n: None, "a function that returns nothing"),
    "a range": (lambda b, h, m, n: sum(range(m)) < n, "used as a Python integer"),
    "math": (lambda b, h, m, n: math.sqrt(m) < n, "used as a Python float"),
    "a string": (lambda b, h, m, n: m < "n", "got a str"),
    "a length of something else": (lambda b, h, m, n: (m + 1).length < n, r"\.length of another"),
    "complex numbers": (lambda b, h, m, n: torch.ones(3, dtype=torch.complex64)[n] == 0, "complex"),
    "another dtype": (
        lambda b, h, m, n: torch.ones(9, dtype=torch.uint16)[n] == 0,
        r"torch.uint16; required: one of torch.bool, .*test_trace.py:\d+",
    ),
    "a power of integers": (lambda b, h, m, n: m**n < 3, "a number from 0 to 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_in_the_language_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(TilewiseError, match=message) as caught:
        trace_mask(function)
    assert str(caught.value).startswith("mask")
    assert isinstance(caught.value, InvalidArgument | InvalidType)


def test_a_score_is_no_condition() -> None:
    with pytest.raises(InvalidType, match=r"^score: .* returns a boolean; .*Pass .* as mask="):
        trace_score(lambda s, b, h, m, n: n <= m)
    trace_score(lambda s, b, h, m, n: n - m)


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_a_numpy_array_is_to_be_a_torch_tensor(shape: tuple[int, ...]) -> None:
    t = np.ones(shape)

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + (t[m] if t.ndim == 1 else t[h, m])

    with pytest.raises(InvalidType, match=r"numpy array .*\(.*test_trace.py:\d+.*torch.from_numpy"):
        trace_score(score)
    with pytest.raises(InvalidType, match="ndarray"):
        trace_score(lambda s, b, h, m, n: t * s)
    t = torch.from_numpy(t).float()  # type: ignore[assignment]
    assert len(trace_score(score)[1]) == 1


def test_numbers_of_numpy_are_numbers() -> None:
    two = np.float32(2), np.float64(2), np.int64(2)
    expected = trace_score(lambda s, b, h, m, n: 2.0 * s)
    for each in two[:2]:
        assert trace_score(lambda s, b, h, m, n, each=each: each * s) == expected
        assert trace_score(lambda s, b, h, m, n, each=each: s * each) == trace_score(
            lambda s, b, h, m, n: s * 2.0
        )
    trace_score(lambda s, b, h, m, n: two[2] * s + two[2])


def test_booleans_of_numpy_are_booleans() -> None:
    yes = np.bool_(True)
    plain = trace_mask(lambda b, h, m, n: n <= m)
    assert trace_mask(lambda b, h, m, n: (n <= m) & yes) == plain
    assert trace_mask(lambda b, h, m, n: yes) == trace_mask(lambda b, h, m, n: True)


def test_what_is_returned_is_refused_at_the_line_of_the_call() -> None:
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(InvalidArgument, match=r"an index for each .*At .*test_trace.py:\d+"):
        tilewise.attention(q, q, q, mask=lambda b, h, m, n: IDS[b])


def test_a_value_of_another_call_is_refused() -> None:
    kept: list[Any] = []

    def first(b: Any, h: Any, m: Any, n: Any) -> Any:
        kept.append(m)
        return m < n

    trace_mask(first)
    with pytest.raises(InvalidArgument, match="a value of another function, or of an earlier call"):
        trace_mask(lambda b, h, m, n: kept[0] < n)
    with pytest.raises(InvalidArgument, match="a value of another function, or of an earlier call"):
        trace_mask(lambda b, h, m, n: kept[0])


def test_tracing_leaves_tensors_as_they_are() -> None:
    trace_mask(lambda b, h, m, n: IDS[b, m] == 0)
    with pytest.raises((TypeError, IndexError)):
        IDS[object()]  # type: ignore[index]
    assert int(IDS[1, 6]) == 3
