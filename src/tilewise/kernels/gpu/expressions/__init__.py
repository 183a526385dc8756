"""Masks and scores as ``triton.jit`` functions, made from the text of their expressions.

Every program takes the same road: it becomes one expression (``variants/recognise.py``), and that
becomes straight-line code, one name per value. The functions are kept by their text, which
linecache holds, so that Triton hashes it, caches what it compiles, and shows it in errors.

A score may have raw steps, which the language cannot read. It is then split into stages: runs of
steps that are one expression, and the raw steps between them. A stage maps the running score s of a
block of pairs.

The functions take positions as kernels have them: ``b`` and ``h`` numbers, ``m`` and ``n`` int32
blocks that broadcast against one another (``[BM, 1]`` and ``[1, BN]``, or transposed), ``M`` and
``N`` numbers. ``tensors`` and ``shapes`` are what ``captures`` makes of captured tensors.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu.expressions import words
from tilewise.kernels.gpu.expressions.text import Source, body, place_in_tensor, range_lines
from tilewise.problem import Problem
from tilewise.variants.derive import differentiate
from tilewise.variants.expr import Expr, Graph
from tilewise.variants.graphs import exactly_sized, mask_expression
from tilewise.variants.intervals import Interval
from tilewise.variants.program import MASK_OPS, RAW, Instr, Program, fitted
from tilewise.variants.raw import registered
from tilewise.variants.recognise import as_expression

_Uses: TypeAlias = tuple[tuple[str, Any], ...]

_OF_MASK = "b, h, m, n, M, N, tensors, shapes"
_OF_SCORE = f"s, {_OF_MASK}"
_OF_QUERIES = "b, m0, m1, M, N, tensors, shapes"
_OF_KEYS = "b, n0, n1, M, N, tensors, shapes"
# Integers are small where positions lie below the first numbers; else below the last one.
_MANY_POSITIONS = 2**24
_MANY_OUTER = 2**16
_ALL = 2**31
_LARGEST_TILE = 2**10


class Captures(NamedTuple):
    """Captured tensors as kernels take them.

    Args:
        tensors: by slot. An empty one is a zero, which is what reading from it gives.
        shapes: of slot 0 the sizes and then the strides, of slot 1 likewise, and so on.
    """

    tensors: tuple[Tensor, ...]
    shapes: tuple[int, ...]


class Table(NamedTuple):
    """A table of the mask's rectangles (``tiles``, ``blocks``) that holds for all of the mask.

    Args:
        slot: of the uint8 tensor [B|1, Hq|1, rows, columns]; 0 says that the mask hides every pair
            of the rectangle. That of ``blocks`` is of booleans: true is for it what 2 is here.
        queries, keys: the sizes of a rectangle.
        whole: whether 2 says that it hides none of them.
    """

    slot: int
    queries: int
    keys: int
    whole: bool


class Variant(NamedTuple):
    """The functions of a mask and a score. All of them are ``triton.jit`` functions.

    Args:
        seen: ``(b, h, m, n, M, N, tensors, shapes) -> int1 [BM, BN]``: which pairs the mask
            shows, with the captures of the mask. None without a mask.
        score: ``(s, b, h, m, n, M, N, tensors, shapes) -> float32 [BM, BN]``: the score, from
            ``s = scale * q.k`` in natural units, with the captures of the score. None without one.
        gain: as ``score``, the derivative of the score with respect to ``s``; None if that is 1.
        loads: as ``score``, the derivative of the score with respect to each load of a float.
        load_slots: the slots of those loads; a slot may be there several times.
        load_indices: as ``score``, an int64 [BM, BN] for each of them: the element that the pair
            loads, counted in a contiguous tensor of its sizes.
        load_forms: an expression for each of them, whose outputs are its indices before clamping,
            one per dimension.
        keys_of: ``(b, m0, m1, M, N, tensors, shapes) -> low, full_low, full_high, high``, numbers
            in [0, N]: of the queries m0..m1-1 (0 <= m0 < m1 <= M) the mask hides every key before
            ``low`` and from ``high`` on, and none in [full_low, full_high), which is empty or lies
            within [low, high]. None without a mask.
        queries_of: ``(b, n0, n1, M, N, tensors, shapes)``, the same with keys and queries
            exchanged.
        tables: what is known of the whole mask.
    """

    seen: Any = None
    score: Any = None
    gain: Any = None
    loads: tuple[Any, ...] = ()
    load_slots: tuple[int, ...] = ()
    load_indices: tuple[Any, ...] = ()
    load_forms: tuple[Expr, ...] = ()
    keys_of: Any = None
    queries_of: Any = None
    tables: tuple[Table, ...] = ()


def captures(tensors: Sequence[Tensor]) -> Captures:
    """Lowered tensors (``variants/lower.py``) as kernels take them."""
    filled = tuple([_filled(tensor) for tensor in tensors])
    return Captures(filled, shape_numbers(filled))


def _filled(tensor: Tensor) -> Tensor:
    return tensor if tensor.numel() else tensor.new_zeros([1] * tensor.dim())


def shape_numbers(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Sizes and strides of every tensor in turn; a dimension of size 1 has a stride of 0."""
    return tuple([number for each in tensors for number in (*each.shape, *_strides(each))])


def _strides(tensor: Tensor) -> list[int]:
    return [
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]


def variant_of(
    problem: Problem, mask_ranks: tuple[int, ...], score_ranks: tuple[int, ...]
) -> Variant:
    """Return the functions of a problem's mask and score; the same ones for the same text.

    Args:
        problem: its programs and sizes.
        mask_ranks: dimensions of the mask's lowered tensors, by slot.
        score_ranks: of the score's.
    """
    # Positions in the last tile may lie past the end, by less than a tile.
    most = max(problem.queries, problem.keys) + _LARGEST_TILE
    largest = _MANY_POSITIONS if most <= _MANY_POSITIONS else _ALL
    outer = _MANY_OUTER if max(problem.batch, problem.heads) <= _MANY_OUTER else _ALL
    return _variant(problem.mask, problem.score, mask_ranks, score_ranks, largest, outer)


@lru_cache(maxsize=256)
def _variant(
    mask: Program,
    score: Program,
    mask_ranks: tuple[int, ...],
    score_ranks: tuple[int, ...],
    largest: int,
    outer: int,
) -> Variant:
    ranges = {name: Interval(0, largest - 1) for name in "mnMN"}
    ranges |= {name: Interval(0, outer - 1) for name in "bh"}
    leaves = tuple(ranges.items())
    found = Variant()
    if score:
        stages = [_stage(steps, score_ranks, leaves, score) for steps in _stages_of(fitted(score))]
        found = stages[0] if len(stages) == 1 else _chained(stages)
    if not mask:
        return found
    source = Source(mask_ranks, exactly_sized(mask), leaves)
    keys, queries = (
        range_lines(mask, mask_ranks, of_keys=of_keys, largest=largest) for of_keys in (True, False)
    )
    return found._replace(
        seen=_function("seen", _OF_MASK, body(mask_expression(mask), source)),
        keys_of=_function("keys_of", _OF_QUERIES, keys),
        queries_of=_function("queries_of", _OF_KEYS, queries),
        tables=_tables(mask),
    )


def _stages_of(program: Program) -> list[Program]:
    """Runs of steps that are one expression, and the raw steps between them."""
    stages: list[Program] = []
    for instr in program:
        if instr.op == RAW or not stages or stages[-1][-1].op == RAW:
            stages.append((instr,))
        else:
            stages[-1] += (instr,)
    return stages


def _stage(
    steps: Program,
    ranks: tuple[int, ...],
    leaves: tuple[tuple[str, Interval], ...],
    whole: Program,
) -> Variant:
    """Return the functions of a stage of a score; ``whole`` is all of it."""
    if steps[0].op != RAW:
        return _scored(as_expression(steps, ranks), Source(ranks, exactly_sized(whole), leaves))
    (instr,) = steps
    name = str(instr.params[0])
    pair = registered(name)
    return Variant(
        score=_raw("score", instr, ranks, f"score_{name}", pair.score),
        gain=_raw("gain", instr, ranks, f"derivative_{name}", pair.derivative),
    )


def _raw(kind: str, instr: Instr, ranks: Sequence[int], name: str, function: Any) -> Any:
    """Return one of a raw step's functions, with the step's own tensors, for a block of any shape.

    Args:
        kind: "score" or "gain".
        instr: the step.
        ranks: dimensions of all tensors of the score, by slot.
        name: what the text calls the function.
        function: a ``triton.jit`` function.
    """
    tensors = [f"tensors[{slot}]" for slot in instr.slots]
    numbers: list[str] = []
    for slot in instr.slots:
        start = 2 * sum(ranks[:slot])
        numbers += [f"shapes[{start + at}]" for at in range(2 * ranks[slot])]
    call = f"{name}(s, b, h, m, n, M, N, {_tuple(tensors)}, {_tuple(numbers)})"
    whole = f"tl.broadcast_to(tl.cast({call}, tl.float32), (m + n).shape)"
    return _of_score(kind, [f"result = {whole}"], ((name, function),))


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)},)" if parts else "()"


def _chained(stages: Sequence[Variant]) -> Variant:
    """Return the functions of a score in several stages, one after another.

    The input of a stage is recomputed from everything before it; the compiler finds what it has
    already.
    """
    score = _Writer(stages)
    score.enter(len(stages))
    gain = _Writer(stages)
    loads, load_indices = [], []
    for place, stage in enumerate(stages):
        for load, index in zip(stage.loads, stage.load_indices, strict=True):
            written = _Writer(stages)
            later = written.slopes(place + 1)
            loads.append(written.function("by_load", written.call(load, place), *later))
            written = _Writer(stages)
            written.enter(place)
            load_indices.append(written.function("load_index", written.call(index, place)))
    return Variant(
        score=score.function("score", f"s{len(stages)}"),
        gain=gain.function("gain", *gain.slopes(0)),
        loads=tuple(loads),
        load_slots=tuple([slot for stage in stages for slot in stage.load_slots]),
        load_indices=tuple(load_indices),
        load_forms=tuple([form for stage in stages for form in stage.load_forms]),
    )


class _Writer:
    """Text that calls the functions of stages."""

    def __init__(self, stages: Sequence[Variant]) -> None:
        self.stages = stages
        self.lines = ["s0 = s"]
        self.uses: dict[str, Any] = {}

    def call(self, function: Any, place: int) -> str:
        """Return a call of a function of the stage at a place, of what enters it."""
        name = function.__name__
        self.uses[name] = function
        return f"{name}(s{place}, {_OF_MASK})"

    def enter(self, place: int) -> None:
        """Compute what enters a stage, and all before it: ``s0`` and so on."""
        for at, stage in enumerate(self.stages[:place]):
            self.lines.append(f"s{at + 1} = {self.call(stage.score, at)}")

    def slopes(self, first: int) -> list[str]:
        """Return the derivatives of the stages from one on, where they are not 1."""
        self.enter(len(self.stages) - 1)
        later = list(enumerate(self.stages))[first:]
        return [self.call(stage.gain, place) for place, stage in later if stage.gain is not None]

    def function(self, kind: str, *factors: str) -> Any:
        """Return the function that gives a product."""
        lines = [*self.lines, f"result = {' * '.join(factors)}"]
        return _of_score(kind, lines, tuple(self.uses.items()))


def _scored(expr: Expr, source: Source) -> Variant:
    """Return the functions of a score that is one expression."""
    whole = differentiate(expr)
    nodes, (_, by_s, *by_loads) = whole.expr
    gain = nodes[by_s]
    loads = [nodes[place] for place in whole.loads]
    slots = tuple([int(load.value or 0) for load in loads])
    forms = tuple([_part(whole.expr, *load.args) for load in loads])
    return Variant(
        score=_of_score("score", body(expr, source)),
        gain=None
        if gain.op == "const_float" and gain.value == 1.0
        else _of_score("gain", body(_part(whole.expr, by_s), source)),
        loads=tuple(
            [_of_score("by_load", body(_part(whole.expr, place), source)) for place in by_loads]
        ),
        load_slots=slots,
        load_indices=tuple(
            [
                _of_score("load_index", place_in_tensor(form, slot, source))
                for form, slot in zip(forms, slots, strict=True)
            ]
        ),
        load_forms=forms,
    )


def _part(expr: Expr, *outputs: int) -> Expr:
    """Some values of an expression, and what they need."""
    graph = Graph()
    return graph.expr(*graph.include(expr._replace(outputs=outputs)))


def _tables(mask: Program) -> tuple[Table, ...]:
    """Return the tables of the program's parts that all have to hold."""
    stack: list[tuple[Table, ...]] = []
    for instr in mask:
        if instr.op == "tiles":
            queries, keys = (int(size) for size in instr.params[:2])
            stack.append((*stack.pop(), Table(instr.slots[0], queries, keys, True)))
        elif instr.op == "blocks":  # its own table: what it says of a rectangle is all of it
            queries, keys = (int(size) for size in instr.params[:2])
            stack.append((Table(instr.slots[0], queries, keys, True),))
        elif instr.op == "and":
            second, first = stack.pop(), stack.pop()
            stack.append(tuple([table._replace(whole=False) for table in (*first, *second)]))
        elif instr.op in ("or", "not"):
            del stack[-MASK_OPS[instr.op].pops :]
            stack.append(())
        else:
            stack.append(())
    return stack.pop()


def _of_score(name: str, lines: Iterable[str], uses: _Uses = ()) -> Any:
    return _function(name, _OF_SCORE, lines, uses)


def _function(name: str, parameters: str, lines: Iterable[str], uses: _Uses = ()) -> Any:
    """A ``triton.jit`` function; the same one for the same text and the same functions in it."""
    text = "\n".join([f"({parameters}):", *lines, "return result"])
    return _compiled(name, text.replace("\n", "\n    ") + "\n", uses)


@lru_cache(maxsize=2048)
def _compiled(kind: str, text: str, uses: _Uses) -> Any:
    """Return the function ``def <kind>_<hash><text>``, which calls others by the names given.

    Triton hashes the sources of these too, and compiles anew where one has changed.
    """
    name = f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    source = f"def {name}{text}"
    # Triton reads the source of a function again; linecache keeps what is of no file.
    path = f"<tilewise {name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    names: dict[str, Any] = {"__name__": __name__, "tl": tl, "words": words, **dict(uses)}
    exec(compile(source, path, "exec"), names)
    return triton.jit(names[name])
