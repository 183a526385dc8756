"""Raw scores in Triton's interpreter: equal to the same scores written in the language."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tilewise
from tests.blocks import block_of, executes
from tests.cases import Case, Inputs, build
from tests.contract import assert_all_same_bits, assert_same_bits
from tests.kernels.gpu import emitted as run
from tests.kernels.gpu.emitted import emitted, problem
from tests.kernels.gpu.guard import GuardError
from tests.oracle import Sent, attend, call, check, problem_of, refer
from tests.variants.drawn import Extents
from tilewise import masks, scores
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.kernels.gpu.expressions import variant_of
from tilewise.variants.values import as_score


@triton.jit
def saturate(s, b, h, m, n, M, N, tensors, shapes):
    """3 t / (1 + |t|) of t = s / 3."""
    t = s / 3.0
    return 3.0 * t / (1.0 + tl.abs(t))


@triton.jit
def saturate_slope(s, b, h, m, n, M, N, tensors, shapes):
    grown = 1.0 + tl.abs(s / 3.0)
    return 1.0 / (grown * grown)


@triton.jit
def pair_weight(m, n, M, N, table, strides):
    """The table's element of each pair, 0 where there is none."""
    at = m * strides[0] + n * strides[1]
    return tl.load(table + at, mask=(m < M) & (n < N), other=0.0)


@triton.jit
def weigh(s, b, h, m, n, M, N, tensors, shapes):
    """s * weights[m, n] + offsets[h], of half precision, less 2 where marks[n] and N is odd."""
    weight = pair_weight(m, n, M, N, tensors[0], (shapes[2], shapes[3]))
    offset = tl.load(tensors[1] + h * shapes[5]).to(tl.float32)
    mark = tl.load(tensors[2] + n * shapes[7], mask=n < N, other=0)
    return s * weight + offset - tl.where((mark != 0) & (N % 2 == 1), 2.0, 0.0)


@triton.jit
def weigh_slope(s, b, h, m, n, M, N, tensors, shapes):
    return pair_weight(m, n, M, N, tensors[0], (shapes[2], shapes[3]))


@triton.jit
def level(s, b, h, m, n, M, N, tensors, shapes):
    return -0.25 * b


@triton.jit
def nothing(s, b, h, m, n, M, N, tensors, shapes):
    return 0.0


@triton.jit
def careless(s, b, h, m, n, M, N, tensors, shapes):
    return s + tl.load(tensors[0] + n)


@triton.jit
def one(s, b, h, m, n, M, N, tensors, shapes):
    return 1.0


for _name, _functions in {
    "saturate": (saturate, saturate_slope),
    "weigh": (weigh, weigh_slope),
    "level": (level, nothing),
    "careless": (careless, one),
}.items():
    scores.register_triton(_name, *_functions)

# torch's own, at the first forward-mode derivative of a process.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

SIZES: dict[str, Any] = {"queries": 37, "keys": 45, "head_dim": 16, "value_dim": 8}
GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2}


def _saturated(s: Any, *_: Any) -> Any:
    t = s / 3.0
    return 3.0 * t / (1.0 + abs(t))


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    """What ``weigh`` reads: a strided table, halves, booleans."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(45, 2, 40, generator=generator)[:, 1].mT
    offsets = torch.randn(4, generator=generator).half()
    return weights, offsets, torch.rand(45, generator=generator) < 0.5


def _weighed(weights: Tensor, offsets: Tensor, marks: Tensor) -> Any:
    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        less = tilewise.where(marks[n] & (n.length % 2 == 1), 2.0, 0.0)
        return s * weights[m, n] + offsets[h] - less

    return score


def _pair(name: str) -> tuple[Any, Any]:
    """A raw score, and the same in the language."""
    tensors = _tensors()
    if name == "saturate":
        return scores.raw("saturate"), _saturated
    if name == "weigh":
        return scores.raw("weigh", *tensors), _weighed(*tensors)
    return scores.raw("level"), lambda s, b, h, m, n: 0.0 * s - 0.25 * b


def _both(case: Case, raw: Any, language: Any) -> tuple[Inputs, Inputs]:
    """The inputs of a case with a raw score, and with the same in the language."""
    inputs = build(case)
    return inputs._replace(score=as_score(raw)), inputs._replace(score=as_score(language))


def _check(case: Case, raw: Any, language: Any) -> None:
    """Output, lse and the gradients by the 2x rule."""
    ours, theirs = _both(case, raw, language)
    reference = refer(theirs)
    check(attend(ours, "gpu", reference.sent), reference, str(case))


CASES = [
    ("saturate", Case("alone", **SIZES)),
    ("saturate", Case("one-row", **SIZES | {"queries": 1}, mask=("causal",))),
    ("saturate", Case("no-rows", **SIZES | {"queries": 0})),
    ("saturate", Case("no-keys", **SIZES | {"keys": 0}, sinks=True)),
    ("saturate", Case("window", **SIZES, mask=("window",), layout="strided", sinks=True)),
    ("weigh", Case("tensors", **SIZES, **GQA, mask=("causal",))),
    ("weigh", Case("odd", **SIZES, **GQA, mask=("document_each",), dropout_p=0.3)),
    ("weigh", Case("packed", **GQA, head_dim=16, value_dim=16, sequences=((33, 20), (0, 5)))),
    ("weigh", Case("packed-causal", **GQA, mask=("causal",), sequences=((1, 40), (17, 0), (7, 9)))),
    ("level", Case("no-slope", **SIZES)),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[case.name for _, case in CASES])
def test_the_2x_rule(name: str, case: Case) -> None:
    """As the same function in the language, with every mask and in every layout."""
    _check(case, *_pair(name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(dtype: torch.dtype) -> None:
    """Scores are float32 whatever the operands are."""
    _check(Case("halves", **SIZES, **GQA, mask=("causal",), dtype=dtype), *_pair("weigh"))


def _chains() -> dict[str, tuple[list[Any], list[Any]]]:
    """Scores before and after raw ones; a bias in each, whose gradient goes through the rest."""
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(4, 37, 45, generator=generator).requires_grad_()
    factors = torch.rand(45, generator=generator)
    (saturated, as_saturated), (weighed, as_weighed) = _pair("saturate"), _pair("weigh")

    def scaled(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * factors[n] + 0.1 * s.sin()

    def near(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s - 0.1 * abs(m - n)

    cap, plus = scores.softcap(2.0), scores.bias(bias)
    return {
        "before": ([plus, scaled, saturated], [plus, scaled, as_saturated]),
        "after": ([saturated, scaled, plus, cap], [as_saturated, scaled, plus, cap]),
        "between": ([plus, weighed, scaled, near, cap], [plus, as_weighed, scaled, near, cap]),
        "two": ([saturated, plus, weighed], [as_saturated, plus, as_weighed]),
        "one-by-one": ([plus, weighed, saturated], [plus, as_weighed, as_saturated]),
    }


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("before", "after", "between", "one-by-one")
        ),
        "two",
    ],
)
def test_composition(name: str) -> None:
    """Value and derivative go through scores before and after, to q, k and a bias."""
    case = Case(f"chain-{name}", **SIZES, **GQA, mask=("causal",), gain=2.0)
    ours, theirs = _both(case, *_chains()[name])
    reference = refer(theirs)
    assert "raw(" in str(ours.score)
    got = attend(ours, "gpu", reference.sent)
    check(got._replace(grads={name: got.grads[name] for name in "qkv"}), reference, str(case))
    torch.testing.assert_close(
        _of_captured(ours, "gpu", reference.sent),
        _of_captured(theirs, "tiled", reference.sent),
        rtol=1e-5,
        atol=1e-5,
    )


def _of_captured(inputs: Inputs, backend: str, sent: Sent) -> Tensor:
    """The gradient of the one captured tensor that is to be learnt."""
    assert inputs.score is not None
    (learned,) = [tensor for tensor in inputs.score.captured if tensor.requires_grad]
    results = call(inputs, backend, return_lse=True)[:2]
    (grad,) = torch.autograd.grad(results, [learned], sent[:2])
    return grad


def test_a_score_after_a_raw_one_may_index_by_it() -> None:
    """The element that is loaded follows from the score that comes in."""
    table = torch.linspace(0.5, 1.5, 9)

    def place(s: Any) -> Any:
        return (s * 2 + 4).long()

    score = as_score([scores.raw("saturate"), lambda s, b, h, m, n: s * table[place(s)]])
    extents = Extents(1, 2, 5, 7)
    variant = emitted(problem(extents, (), score.program), (), score.captured)
    s = torch.randn(*extents, generator=torch.Generator().manual_seed(1)) * 4
    enters = _saturated(s)
    found = run.scored(variant.load_indices[0], extents, score.captured, s)
    assert torch.equal(found, place(enters).clamp(0, 8).float())
    found = run.scored(variant.score, extents, score.captured, s)
    torch.testing.assert_close(found, enters * table[place(enters).clamp(0, 8)])


def test_a_load_without_a_mask_is_found_out() -> None:
    """Positions of a partial block lie past the end; the guard of these tests sees it."""
    q = torch.randn(1, 1, 20, 16)
    with pytest.raises(Exception, match="out of bounds") as caught:
        tilewise.attention(q, q, q, score=scores.raw("careless", torch.zeros(20)), backend="gpu")
    assert isinstance(caught.value, GuardError) or "GuardError" in str(caught.value)


def test_what_lies_beyond_a_length_does_not_leak() -> None:
    """NaN in what is hidden, forward and backward."""
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    lengths = torch.tensor([17, 33])
    keywords: dict[str, Any] = {
        "mask": masks.lengths(lengths),
        "score": scores.raw("saturate"),
        "backend": "gpu",
    }
    good, bad = k.clone().requires_grad_(), k.clone()
    bad[0, :, 32:] = torch.nan
    bad[1, :, 33:] = torch.nan
    bad.requires_grad_()
    outs = [tilewise.attention(q, each, v, **keywords) for each in (good, bad)]
    assert_same_bits(outs[1], outs[0], "out")
    for out in outs:
        out.sum().backward()
    assert good.grad is not None
    assert bad.grad is not None
    assert_same_bits(bad.grad[:, :, :16], good.grad[:, :, :16], "grad of k")


@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """A graph has the name; the op finds the functions in its process. One graph for any sizes."""
    torch._dynamo.reset()
    weights, offsets, marks = _tensors()

    def call(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        score = [scores.raw("weigh", weights, offsets, marks), scores.raw("saturate")]
        out: Tensor = tilewise.attention(q, k, v, score=score, backend="gpu")
        return out

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for keys in (40, 23):
        q, k, v = (torch.randn(1, 4, keys, 16).requires_grad_() for _ in range(3))
        outs = [function(q, k, v, weights) for function in (compiled, call)]
        assert_same_bits(outs[0], outs[1], "out")
        grads = [torch.autograd.grad(out.square().sum(), [q, k, v]) for out in outs]
        assert_all_same_bits(grads[0], grads[1], "gradient")


def test_no_gradient_is_silently_missing() -> None:
    """What the functions read has none; and there is no second derivative, and no tangent."""
    q = torch.randn(1, 4, 20, 16).requires_grad_()
    weights, offsets, marks = _tensors()
    learned = scores.raw("weigh", weights.clone().requires_grad_(), offsets, marks)
    with pytest.raises(Unsupported, match=r"'weigh' has no gradient with respect to a tensor"):
        tilewise.attention(q, q, q, score=learned, backend="gpu")
    with torch.no_grad():
        tilewise.attention(q, q, q, score=learned, backend="gpu")

    def attention(x: Tensor, table: Tensor = weights) -> Tensor:
        score = scores.raw("weigh", table, offsets, marks)
        out: Tensor = tilewise.attention(x, x, x, score=score, backend="gpu")
        return out.square().sum()

    with pytest.raises(Unsupported, match="no derivative with respect to a tensor"):
        torch.func.grad(lambda table: attention(q.detach(), table))(weights)
    with pytest.raises(Unsupported, match="no forward-mode and no second derivative"):
        torch.func.jvp(attention, (q.detach(),), (torch.ones_like(q),))
    (first,) = torch.autograd.grad(attention(q), [q], create_graph=True)
    with pytest.raises(Unsupported, match="no forward-mode and no second derivative"):
        first.sum().backward()
    torch.testing.assert_close(torch.func.grad(attention)(q.detach()), first.detach())


def test_other_backends_say_why_not() -> None:
    """By name and by themselves."""
    q = torch.randn(1, 1, 4, 8)
    for backend in ("cpu", "tiled", None):
        with pytest.raises(Unsupported, match="the score 'saturate' is Triton code"):
            tilewise.attention(q, q, q, score=scores.raw("saturate"), backend=backend)
    plan = tilewise.plan(q, q, q, score=scores.raw("saturate"), backend="gpu")
    assert plan.backend == "gpu"
    with pytest.raises(InvalidArgument, match="raw"):
        tilewise.attention(q, q, q, score=_saturated, plan=plan)


def test_the_functions_are_part_of_what_is_compiled() -> None:
    """The user's functions are called, not copied: Triton hashes the sources of what is called."""
    score = as_score([_saturated, *_chains()["two"][0]])
    inputs = build(Case("text", **SIZES, **GQA))._replace(score=score)
    problem, operands = problem_of(inputs.detached())
    variant = variant_of(problem, (), tuple(x.dim() for x in operands.score_tensors))
    names = [name for name in variant.score.fn.__code__.co_names if name.startswith("score_")]
    used = [variant.score.fn.__globals__[name].fn.__globals__ for name in names]
    assert [names["score_saturate"] for names in used if "score_saturate" in names] == [saturate]
    assert [names["score_weigh"] for names in used if "score_weigh" in names] == [weigh]


@executes("docs/variants.md", 3)
def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    """It runs as it stands there, and is what it says."""
    example = block_of("docs/variants.md", 3).code
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16).requires_grad_() for _ in range(3))
    file = tmp_path / "example.py"  # Triton wants to read the source again
    file.write_text(example)
    names: dict[str, Any] = {"q": q, "k": k, "v": v, "__name__": "example"}
    on_gpu = partial(tilewise.attention, backend="gpu")
    with mock.patch.object(tilewise, "attention", on_gpu):
        exec(compile(example, str(file), "exec"), names)
    weights = names["score"][0].captured[0]
    score = as_score([lambda s, b, h, m, n: s * weights[n], scores.softcap(30.0)])
    expected = tilewise.attention(q, k, v, mask=masks.causal(), score=score, backend="tiled")
    found = [torch.autograd.grad(out.square().sum(), [q, k, v]) for out in (names["out"], expected)]
    torch.testing.assert_close((names["out"], *found[0]), (expected, *found[1]))
