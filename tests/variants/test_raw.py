"""Raw scores as far as no Triton is needed: the registry, programs, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewise
from tilewise import scores
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.variants.lower import Extent, lower_score
from tilewise.variants.program import Instr, check_score, decode, encode, fitted
from tilewise.variants.raw import registered
from tilewise.variants.values import Score, as_score

_PARAMETERS = ["s", "b", "h", "m", "n", "M", "N", "tensors", "shapes"]
_CPU = torch.device("cpu")


def jitted(parameters: list[str] | None = None, **more: Any) -> Any:
    """What is seen of a jit function."""
    return SimpleNamespace(fn=abs, arg_names=parameters or _PARAMETERS, **more)


PAIR = (jitted(), jitted())
scores.register_triton("kept", *PAIR)


def test_a_name_keeps_its_functions() -> None:
    """Again with the same ones is nothing; with others it is refused, and changes nothing."""
    scores.register_triton("kept", *PAIR)
    for pair in ((PAIR[0], jitted()), (jitted(), PAIR[1]), (PAIR[1], PAIR[0])):
        with pytest.raises(InvalidArgument, match="'kept', which has other functions already"):
            scores.register_triton("kept", *pair)
    assert registered("kept") == PAIR
    assert registered("kept").score is PAIR[0]


def test_the_same_source_is_the_same_function() -> None:
    """A cell of a notebook that runs again makes a new object: Triton's key tells."""
    first, again, other = (jitted(cache_key=key) for key in ("one", "one", "another"))
    scores.register_triton("cell", first, first)
    scores.register_triton("cell", again, again)
    assert registered("cell").score is first
    with pytest.raises(InvalidArgument, match="'cell', which has other functions"):
        scores.register_triton("cell", other, other)


@pytest.mark.parametrize("name", ["", "2fast", "a b", "a.b", "naïve", "f(x)", "a[0]"])
def test_names_are_words(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^name: got .* letters, digits and underscores"):
        scores.register_triton(name, *PAIR)


def test_what_is_no_jit_function_is_refused() -> None:
    for pair, argument in (((abs, PAIR[1]), "score"), ((PAIR[0], None), "derivative")):
        with pytest.raises(InvalidType, match=rf"^{argument}: got a .*decorated with @triton\.jit"):
            scores.register_triton("plain", *pair)
    with pytest.raises(InvalidArgument, match=r"^derivative: got 2 parameters \(s, b\)"):
        scores.register_triton("short", PAIR[0], jitted(["s", "b"]))
    with pytest.raises(InvalidType, match=r"^name: got a int"):
        scores.register_triton(3, *PAIR)  # type: ignore[arg-type]
    for name in ("plain", "short"):
        with pytest.raises(InvalidArgument, match=f"the name {name!r}"):
            scores.raw(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: scores.raw("nobody"),
        lambda: decode("raw(nobody)[0]"),
        lambda: Score((Instr("raw", ("nobody",)),)),
        lambda: pickle.loads(pickle.dumps(scores.raw("kept")).replace(b"kept", b"lost")),
    ],
    ids=["raw", "text", "program", "pickle"],
)
def test_a_name_of_nobody_is_refused_at_once(make: Callable[[], object]) -> None:
    """With what to do about it."""
    with pytest.raises(InvalidArgument, match=r"register_triton\(name, score, derivative\) first"):
        make()


def test_arguments_of_raw() -> None:
    with pytest.raises(InvalidType, match=r"^name: got a float"):
        scores.raw(1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match=r"^tensors\[1\]: got a list; required: a tensor"):
        scores.raw("kept", torch.zeros(3), [1])  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["raw(kept)", "raw(kept)[0]", "raw(kept)[0,1] raw(kept)[2]"])
def test_text(text: str) -> None:
    """There and back; the fitting form is the same."""
    program = decode(text)
    assert encode(program) == text
    assert fitted(program) == program


@pytest.mark.parametrize("text", ["raw", "raw()", "raw(1)", "raw(kept,kept)", "raw(kept)[a]"])
def test_text_that_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^program: "):
        decode(text)


def test_where_an_expression_may_stand() -> None:
    """First, or after a raw step: elsewhere the steps become one."""
    check_score(decode("expr{s;const_float:2.0;mul(0,1)} raw(kept) expr{s;sin(0)} softcap(2.0)"))
    for text in ("raw(kept) softcap(2.0) expr{s;sin(0)}", "bias()[0] expr{s;sin(0)}"):
        with pytest.raises(InvalidArgument, match="as the first step"):
            decode(text)


def test_a_chain_is_in_pieces() -> None:
    """What is before a raw step and what is after it are expressions by themselves."""
    bias, row, table = torch.zeros(5, 5), torch.zeros(7), torch.zeros(9)

    def with_table(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * table[m - n]

    raw, plus, cap = scores.raw("kept", row), scores.bias(bias), scores.softcap(2.0)
    chain = as_score([plus, with_table, raw, plus, raw, with_table, cap])
    names = [instr.op for instr in chain.program]
    assert names == ["expr", "raw", "bias", "raw", "expr", "softcap"]
    slots = [slot for instr in chain.program for slot in instr.slots]
    held = [chain.captured[slot] for slot in slots]
    wanted = [bias, table, row, bias, row, table]
    assert all(one is other for one, other in zip(held, wanted, strict=True))
    assert as_score([chain]).program == chain.program
    nested = as_score([as_score([plus, with_table]), as_score([raw, plus]), raw, with_table, cap])
    assert nested.text == chain.text


def test_tensors_are_handed_on_as_they_are() -> None:
    """Any dtype and strides; what wants a gradient is refused, for there is none."""
    given = [torch.zeros(4, 6).mT, torch.tensor([True]), torch.arange(3), torch.zeros(2).double()]
    score = scores.raw("kept", *given)
    lowered = lower_score(score.program, score.captured, Extent(1, 1, 2, 2), torch.float16, _CPU)
    for ours, theirs in zip(lowered, given, strict=True):
        assert (ours.data_ptr(), ours.dtype, ours.stride()) == (
            theirs.data_ptr(),
            theirs.dtype,
            theirs.stride(),
        )
    for bad, error, said in (
        (torch.zeros(3, requires_grad=True), Unsupported, r"pass tensor\.detach\(\)"),
        (torch.zeros(3, dtype=torch.complex64), InvalidArgument, "real or integer numbers"),
        (torch.zeros(3, device="meta"), InvalidArgument, "on q's device"),
    ):
        wrong = scores.raw("kept", bad)
        with pytest.raises(error, match=said):
            lower_score(wrong.program, (bad,), Extent(1, 1, 2, 2), torch.float16, _CPU)


@pytest.mark.parametrize("backend", ["cpu", "tiled", None])
def test_backends_that_run_no_triton_say_so(backend: str | None) -> None:
    q = torch.zeros(1, 1, 2, 8)
    mixed = [scores.softcap(2.0), scores.raw("kept")]
    mask = tilewise.masks.causal() & (lambda b, h, m, n: n < 9)
    with pytest.raises(Unsupported, match=r"'kept' is Triton code.*runs on every") as caught:
        tilewise.attention(q, q, q, mask=mask, score=mixed, backend=backend)
    assert "mask causal & below(9), score softcap(2.0), then raw(kept)\n" in str(caught.value)
