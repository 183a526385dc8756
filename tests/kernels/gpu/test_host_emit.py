"""Emitted Triton functions against the reference's expressions and programs, and their text."""

from __future__ import annotations

import inspect
import linecache

import pytest
import torch

from tests.kernels.gpu.emitted import emitted, problem
from tests.variants.drawn import Extents
from tilewise.kernels.gpu.expressions import Table, captures, shape_numbers, variant_of
from tilewise.kernels.gpu.expressions.text import Source, body
from tilewise.variants.expr import decode, encode
from tilewise.variants.intervals import Interval
from tilewise.variants.program import decode as program_of

_RANGES = tuple({name: Interval(0, 1000) for name in "bhmnMN"}.items())


def _text(text: str) -> str:
    return "\n".join(body(decode(text), Source((1, 1), frozenset(), _RANGES)))


def test_small_integers_are_narrow() -> None:
    """int32 where nothing can overflow, else int64."""
    narrow = _text("m;n;mul(0,1);const_int:7;add(2,3);lt(4,0)")
    assert "int64" not in narrow
    wide = _text("m;const_int:1099511627776;mul(0,1);n;lt(2,3)")
    assert "v2 = v0.to(tl.int64) * v1" in wide
    assert "v4 = v2 < v3.to(tl.int64)" in wide


@pytest.mark.parametrize(
    ("divided", "expected"),
    [
        ("m;const_int:8;floordiv(0,1);const_int:3;lt(2,3)", "v0 >> 3"),
        ("m;const_int:8;mod(0,1);const_int:3;lt(2,3)", "v0 & 7"),
        ("m;const_int:6;floordiv(0,1);const_int:3;lt(2,3)", "v0 // v1"),
        ("m;n;sub(0,1);const_int:6;mod(2,3);lt(4,0)", "words.mod_positive(v2, v3)"),
        ("m;n;floordiv(0,1);lt(2,0)", "words.floordiv_any"),
    ],
)
def test_division_is_as_short_as_may_be(divided: str, expected: str) -> None:
    """By powers of two, positive numbers, and what may be 0."""
    assert expected in _text(divided)


def test_division_of_floats_is_exact_where_it_is_seen() -> None:
    """An inverse is good enough for a soft cap, not for what is compared."""
    assert "v0 * 0.25" in _text("s;const_float:4.0;div(0,1)")
    assert "tl.div_rn(v0, v1)" in _text("s;const_float:3.0;div(0,1)")
    assert "v0 * 0.3333" in _text("s;const_float:3.0;div(0,1);tanh(2)")


def test_same_text_same_function() -> None:
    """A function is made once, and Triton finds its source."""
    program = program_of("band(-1,0,1)")
    one, other = (variant_of(problem(Extents(keys=n), program), (), ()) for n in (7, 9))
    assert one.seen is other.seen
    assert one.keys_of is not one.queries_of
    source = inspect.getsource(one.seen.fn)
    assert source.startswith(f"def {one.seen.fn.__name__}(b, h, m, n, M, N, tensors, shapes):")
    path = inspect.getsourcefile(one.seen.fn)
    assert path in linecache.cache
    linecache.checkcache()
    assert inspect.getsource(one.seen.fn) == source


def test_without_programs_there_is_nothing() -> None:
    """Kernels leave out what is None."""
    assert variant_of(problem(Extents()), (), ()) == ((None,) * 3 + ((),) * 4 + (None, None, ()))


def test_gain_of_an_addition_is_none() -> None:
    """The derivative is the constant 1, or another one."""
    bias = emitted(problem(Extents(), (), program_of("bias()[0]")), (), [torch.zeros(1, 1, 5, 7)])
    assert bias.gain is None
    assert bias.load_slots == (0,)
    assert encode(bias.load_forms[0]) == "b;h;m;n;=0,1,2,3"
    assert emitted(problem(Extents(), (), program_of("softcap(2.0)"))).gain is not None


def test_captures_have_no_empty_tensor() -> None:
    """Sizes and strides in turn; what is empty is a zero; what has one element does not move."""
    given = captures([torch.ones(3, 1, 2).transpose(0, 2), torch.ones(0, 4), torch.tensor(3.0)])
    assert given.shapes == (2, 1, 3, 1, 0, 2, 1, 1, 0, 0)
    assert given.tensors[1].tolist() == [[0.0]]
    assert shape_numbers([]) == ()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("band(-1,0,1) tiles(16,32,0,0,0,0,0)[0]", [Table(0, 16, 32, True)]),
        ("band(-1,0,1) tiles(16,32,0,0,0,0,0)[0] below(3) and", [Table(0, 16, 32, False)]),
        ("band(-1,0,1) tiles(16,32,0,0,0,0,0)[0] below(3) or", []),
        ("band(-1,0,1) tiles(16,32,0,0,0,0,0)[0] not", []),
        (
            "band(-1,0,1) tiles(16,32,0,0,0,0,0)[0] below(3) tiles(8,8,0,0,0,0,0)[1] and "
            "tiles(4,4,0,0,0,0,0)[2]",
            [Table(0, 16, 32, False), Table(1, 8, 8, False), Table(2, 4, 4, True)],
        ),
    ],
)
def test_tables(program: str, expected: list[Table]) -> None:
    """Those of the mask's parts that all have to hold; full only if there is no other part."""
    mask = program_of(program)
    ranks = (4,) * (1 + max(slot for instr in mask for slot in instr.slots))
    assert list(variant_of(problem(Extents(), mask), ranks, ()).tables) == expected
