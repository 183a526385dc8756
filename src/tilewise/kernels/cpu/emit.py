"""C++ for the program of an expression: one function, in the words of csrc/expr_words.h.

The core hands over the program that its interpreter would run: which values are needed, how often
each changes (``extent``), how wide integers are. What holds for a tile or for a query stays the
interpreter's, which leaves it in registers; the code does the work per key and per pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["MOST_VALUES", "Program", "Value", "emit", "program_of"]

# Compilers take seconds for some hundred values, and minutes for thousands.
MOST_VALUES = 1500

_WHOLE_TILE, _PER_QUERY, _PER_KEY, _PER_PAIR = range(4)
_BOOL, _INT, _FLOAT = range(3)
_TYPES = ("Truths", "Wholes", "Reals")
_STORED = ("unsigned char", "i64", "Real")


class Value(NamedTuple):
    """One value of a program.

    Args:
        op: its operation, as in variants/expr.py but for "constant", "load", and the quotients by
            powers of two "shr_by" and "bits_of".
        kind: 0 boolean, 1 integer, 2 float.
        arg_kind: of its last argument.
        extent: bit 0, it depends on the query; bit 1, on the key.
        args: places of its arguments; of a load, one index per dimension.
        reg: its register among those of its extent; -1 for the score.
        slot: of a load.
        integer, real: of a constant; of "shr_by" and "bits_of" the number of bits, and the bits.
    """

    op: str
    kind: int
    arg_kind: int
    extent: int
    args: tuple[int, ...]
    reg: int
    slot: int
    integer: int
    real: float


class Program(NamedTuple):
    """A program as the core describes it.

    Args:
        isa: the instruction set that it is for.
        float_bits, int_bits: widths.
        use: "mask" (one bit per pair), "score" (the score, and its derivative if there are two
            outputs) or "loads" (outputs and kept values are left in registers).
        values: by extent, each after its arguments.
        outputs, kept: places.
    """

    isa: str
    float_bits: int
    int_bits: int
    use: str
    values: tuple[Value, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...]


def program_of(described: tuple[object, ...]) -> Program:
    """The program from the core's plain tuples."""
    program = Program(*described)  # type: ignore[arg-type]
    return program._replace(values=tuple([Value(*value) for value in program.values]))


def emit(program: Program, headers: str) -> str:
    """The source of ``extern "C" void tilewise_expression(tilewise::ExprFrame*)``.

    Args:
        program: what to compute.
        headers: the text of the headers that it is written in.
    """
    vector_bytes = 64 if "avx512" in program.isa else 32 if "avx2" in program.isa else 16
    defines = [
        f"#define TILEWISE_ISA {program.isa}",
        f"#define TILEWISE_VECTOR_BYTES {vector_bytes}",
        f"#define TILEWISE_REAL {'double' if program.float_bits == 64 else 'float'}",
        f"#define TILEWISE_WHOLE i{program.int_bits}",
        "#if defined(__x86_64__)",
        "#define TILEWISE_X86 1",
        "#endif",
    ]
    return "\n".join([*defines, headers, *_Writer(program).lines(), ""])


class _Writer:
    """The lines of one function."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = program.values
        self.loads = [
            place
            for place, value in enumerate(self.values)
            if value.op == "load" and value.extent >= _PER_KEY
        ]

    def lines(self) -> Iterator[str]:
        yield "namespace tilewise::TILEWISE_ISA {"
        yield "static void piece(ExprFrame& f) {"
        yield "  const int width = f.width, count = f.count;"
        yield "  const i64 n0 = f.n0;"
        yield from self._before()
        yield "  for (int j = 0; j < count; j++) {"
        yield from self._per_key()
        yield "    for (int i = 0; i < width; i += kStep) {"
        yield from self._per_pair()
        yield "    }"
        if self.program.use == "mask":
            yield "    f.bits[j] = seen;"
        yield "  }"
        if self.program.use == "score":
            yield "  f.low = low != 0;"
        yield "}"
        yield "}  // namespace tilewise::TILEWISE_ISA"
        yield "#pragma GCC visibility push(default)"
        yield 'extern "C" void tilewise_expression(tilewise::ExprFrame* f) {'
        yield "  tilewise::TILEWISE_ISA::piece(*f);"
        yield "}"
        yield "#pragma GCC visibility pop"

    def _before(self) -> Iterator[str]:
        """What holds for the piece: where results go, values of the tile, sources of loads."""
        if self.program.use == "score":
            yield "  const int rows = f.rows;"
            yield "  Real* const scores = static_cast<Real*>(f.s);"
            yield "  Real* const gain = static_cast<Real*>(f.gain);"
            yield "  const Real lowest = static_cast<Real>(f.lowest);"
            yield "  u64 low = 0;"
        elif any(value.op == "s" for value in self.values):
            yield "  const Real* const scores = static_cast<const Real*>(f.s);"
        if any(value.op == "s" for value in self.values):
            yield "  const Reals scale = reals(f.scale);"
        for place in sorted(self._read(_WHOLE_TILE)):
            yield f"  const {self._type(place)} v{place} = {self._tile_value(place)};"
        for place in self.loads:
            value = self.values[place]
            yield (
                f"  const Source<{_STORED[value.kind]}> t{place} = "
                f"source<{_STORED[value.kind]}>(f.tensors[{value.slot}]);"
            )
            yield f"  i64 base{place} = 0;"
            for dim, arg in self._indices(place, _WHOLE_TILE):
                yield f"  base{place} += moved_first(t{place}, {dim}, v{arg});"
            queries = self._indices(place, _PER_QUERY)
            if queries:
                yield f"  Wholes query{place}[kTileQueries / kStep];"
                terms = [
                    f"moved(t{place}, {dim}, {self._register(arg, 'i')})" for dim, arg in queries
                ]
                yield "  for (int i = 0; i < width; i += kStep)"
                yield f"    query{place}[i / kStep] = {_sum(terms)};"

    def _per_key(self) -> Iterator[str]:
        if self.program.use == "mask":
            yield "    u64 seen = 0;"
        for place, value in enumerate(self.values):
            if value.extent == _PER_KEY:
                if value.op == "load":
                    text = f"pick_one<{self._type(place)}>(t{place}, {self._row(place)})"
                else:
                    text = self._computed(place)
                yield f"    const {self._type(place)} v{place} = {text};"
                if self._is_left(place):
                    yield f"    write(f, {_PER_KEY}, {value.reg}, j * kStep, v{place});"
        for place in self.loads:
            if self.values[place].extent == _PER_PAIR:
                yield f"    const i64 row{place} = {self._row(place)};"

    def _row(self, place: int) -> str:
        """Where a load's elements begin: what tile and key contribute."""
        terms = [f"base{place}"]
        for dim, arg in self._indices(place, _PER_KEY):
            terms.append(f"moved_first(t{place}, {dim}, v{arg})")
        return " + ".join(terms)

    def _per_pair(self) -> Iterator[str]:
        for place in sorted(self._read(_PER_QUERY)):
            yield f"      const {self._type(place)} v{place} = {self._register(place, 'i')};"
        for place, value in enumerate(self.values):
            if value.extent != _PER_PAIR:
                continue
            text = self._picked(place) if value.op == "load" else self._computed(place)
            yield f"      const {self._type(place)} v{place} = {text};"
            if self._is_left(place):
                yield f"      write(f, {_PER_PAIR}, {value.reg}, j * width + i, v{place});"
        yield from self._results()

    def _results(self) -> Iterator[str]:
        outputs = self.program.outputs
        if self.program.use == "mask":
            yield f"      seen |= bits_of_mask<Truth>(v{outputs[0]}) << i;"
        elif self.program.use == "score":
            yield f"      const Reals score = there(v{outputs[0]}, i, rows);"
            yield "      low |= too_low(score, lowest);"
            yield "      store(scores + j * width + i, score);"
            if len(outputs) > 1:
                yield f"      store(gain + j * width + i, there(v{outputs[1]}, i, rows));"

    def _picked(self, place: int) -> str:
        terms = [f"wholes(row{place})"]
        if self._indices(place, _PER_QUERY):
            terms.append(f"query{place}[i / kStep]")
        terms += [f"moved(t{place}, {dim}, v{arg})" for dim, arg in self._indices(place, _PER_PAIR)]
        return f"pick<{self._type(place)}>(t{place}, {_sum(terms)})"

    def _computed(self, place: int) -> str:
        value = self.values[place]
        match value.op:
            case "s":
                return "op_mul(load(scores + j * width + i), scale)"
            case "n":
                return "wholes(n0 + j)"
            case "shr_by" | "bits_of":
                return f"op_{value.op}(v{value.args[0]}, {_integer(value.integer)})"
        args = ", ".join([f"v{arg}" for arg in value.args])
        return f"op_{value.op}({args})"

    def _tile_value(self, place: int) -> str:
        value = self.values[place]
        if value.op != "constant":
            return self._register(place, "0")
        if value.kind == _FLOAT:
            return f"reals({_float(value.real)})"
        if value.kind == _INT:
            return f"wholes({_integer(value.integer)})"
        return f"truths({'true' if value.integer else 'false'})"

    def _register(self, place: int, at: str) -> str:
        value = self.values[place]
        read = "read_truths" if value.kind == _BOOL else f"read<{self._type(place)}>"
        return f"{read}(f, {value.extent}, {value.reg}, {at})"

    def _type(self, place: int) -> str:
        return _TYPES[self.values[place].kind]

    def _indices(self, place: int, extent: int) -> list[tuple[int, int]]:
        """The dimensions of a load whose index has that extent, with the index's place."""
        args = self.values[place].args
        return [(dim, arg) for dim, arg in enumerate(args) if self.values[arg].extent == extent]

    def _read(self, extent: int) -> set[int]:
        """Places of that extent that the code reads."""
        read = {
            arg
            for value in self.values
            if value.extent >= _PER_KEY
            for arg in value.args
            if value.op != "load" or extent == _WHOLE_TILE
        }
        if self.program.use != "loads":
            read |= set(self.program.outputs)
        return {place for place in read if self.values[place].extent == extent}

    def _is_left(self, place: int) -> bool:
        """Whether the value is left in its register."""
        if self.program.use != "loads" or self.values[place].reg < 0:
            return False
        return place in self.program.outputs or place in self.program.kept


def _sum(terms: list[str]) -> str:
    text = terms[0]
    for term in terms[1:]:
        text = f"op_add({text}, {term})"
    return text


def _integer(value: int) -> str:
    # The least number has no literal.
    return f"({value + 1}LL - 1)" if value < 0 else f"{value}LL"


def _float(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nan("")'
    if math.isinf(value):
        return "__builtin_inf()" if value > 0 else "-__builtin_inf()"
    return value.hex()
