"""Emit C++ for an expression's program: one function, in the words of csrc/expressions/words.h.

The core hands over the program that its interpreter would run: which values are needed, how often
each changes (``extent``), how wide integers are. The interpreter still computes the values of a
tile or a query, and leaves them in registers. The code does the work per key and per pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

_WHOLE_TILE, _PER_QUERY, _PER_KEY, _PER_DIAGONAL, _PER_PAIR = range(5)


class Value(NamedTuple):
    """One value of a program."""

    # Its operation, as in variants/operations.py but for "constant", "load", the quotients by
    # powers of two "shr_by" and "bits_of", "power_by" and "difference" (of positions).
    op: str
    kind: int  # 0 boolean, 1 integer, 2 float
    arg_kind: int  # of its last argument
    extent: int  # what it depends on: 0 nothing in the tile, 1 the query, 2 the key, 4 both
    args: tuple[int, ...]  # places of its arguments; of a load, one index per dimension
    reg: int  # its register among those of its extent; -1 for the score
    slot: int  # of a load
    # Both: of a constant; the number of bits of "shr_by", the bits of "bits_of", the exponent of
    # "power_by".
    integer: int
    real: float
    diagonal: bool = False  # whether it depends on the difference of query and key alone


class Program(NamedTuple):
    """A program as the core describes it."""

    isa: str  # the instruction set that it is for
    # Both: widths.
    float_bits: int
    int_bits: int
    coarse: bool  # whether operands and results have 16 bits
    # "mask" (one bit per pair), "score" (the score, and its derivative if there are two outputs) or
    # "loads" (outputs and kept values are left in registers).
    use: str
    values: tuple[Value, ...]  # by extent, each after its arguments
    # Both: places.
    outputs: tuple[int, ...]
    kept: tuple[int, ...]


def program_of(described: tuple[object, ...]) -> Program:
    """Return the program from the core's plain tuples."""
    program = Program(*described)  # type: ignore[arg-type]
    values = []
    for value in [Value(*each) for each in program.values]:
        # What depends on the diagonal is computed per pair, and its register is the interpreter's.
        if value.extent == _PER_DIAGONAL:
            value = value._replace(extent=_PER_PAIR, reg=-1, diagonal=True)
        values.append(value)
    return program._replace(values=tuple(values))


# Compilers take seconds for some hundred values, and minutes for thousands.
_MOST_VALUES = 1500
_MOST_LISTED = 128  # arrays of kExprKeys elements
_MOST_UNROLLED = 120
_SMOOTH = {"tanh", "sigmoid"}

_BOOL, _INT, _FLOAT = range(3)
_TYPES = ("Truths", "Wholes", "Reals")
_ELEMENTS = ("Truth", "Whole", "Real")
_STORED = ("unsigned char", "i64", "Real")


def why_not(program: Program) -> str | None:
    """Return why a program is not for compilers; None if it is."""
    count, listed = len(program.values), len(_Writer(program).listed)
    if count > _MOST_VALUES:
        return f"it has {count} values; more than {_MOST_VALUES} take a compiler too long"
    if listed > _MOST_LISTED:
        return f"it has {listed} values per key; more than {_MOST_LISTED} fill a thread's stack"
    return None


def emit(program: Program, headers: str) -> str:
    """Return the source of ``extern "C" void tilewise_expression(tilewise::ExprFrame*)``.

    ``headers`` is the text of the headers that it is written in.
    """
    vector_bytes = 64 if "avx512" in program.isa else 32 if "avx2" in program.isa else 16
    defines = [
        f"#define TILEWISE_ISA {program.isa}",
        f"#define TILEWISE_VECTOR_BYTES {vector_bytes}",
        f"#define TW_REAL {'double' if program.float_bits == 64 else 'float'}",
        f"#define TW_WHOLE i{program.int_bits}",
        "#if defined(__x86_64__)",
        "#define TILEWISE_X86 1",
        "#endif",
    ]
    return "\n".join([*defines, headers, *_Writer(program).lines(), ""])


class _Writer:
    """The lines of the code: values per key into arrays first, then column by column of queries.

    A column is one vector of queries; four of them go through the keys together.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = program.values
        self.score = self._lonely_score()
        self.listed = self._listed()
        self.words = self._words()
        self.hidden = self._hidden()

    def lines(self) -> Iterator[str]:
        yield "namespace tilewise::TILEWISE_ISA {"
        yield "struct Keys {"
        for place in sorted(self.listed):
            yield f"  alignas(64) {_ELEMENTS[self.values[place].kind]} v{place}[kExprKeys];"
        for place in sorted(self.words):
            yield f"  u64 w{place}[kDiagonalWords];"
        yield "};"
        yield from self._keys()
        if self.words:
            yield from self._diagonals()
        yield "template <int kV>"
        yield "static void columns(ExprFrame& f, const Keys& keys, int from) {"
        yield from self._columns()
        yield "}"
        yield "}  // namespace tilewise::TILEWISE_ISA"
        yield from _ENTRY
        if self.words:
            yield "  diagonals(*f, keys);"
        yield "  int i = 0;"
        # Four copies of a long text would take a compiler long, and gain nothing.
        if len(self.values) <= _MOST_UNROLLED:
            yield "  for (; i + 4 * kStep <= f->width; i += 4 * kStep) columns<4>(*f, keys, i);"
        yield "  for (; i < f->width; i += kStep) columns<1>(*f, keys, i);"
        yield "}"

    def _keys(self) -> Iterator[str]:
        """Yield the function that fills the arrays."""
        yield "static void fill(ExprFrame& f, Keys& keys) {"
        yield "  const i64 n0 = f.n0;"
        yield from self._tile(_PER_KEY)
        yield "  for (int j = 0; j < f.count; j++) {"
        for place in self._of_keys():
            value, kind = self.values[place], _TYPES[self.values[place].kind]
            text = self._computed(place)
            if value.op == "load":
                rows = [
                    f"moved_first(t{place}, {dim}, first(v{arg}))"
                    for dim, arg in self._indices(place, _PER_KEY)
                ]
                text = f"pick_one<{kind}>(t{place}, {' + '.join([f'base{place}', *rows])})"
            yield f"    const {kind} v{place} = {text};"
            if place in self.listed:
                yield f"    keys.v{place}[j] = first(v{place});"
            if self._is_left(place):
                yield f"    write(f, {_PER_KEY}, {value.reg}, j * kStep, v{place});"
        yield "  }"
        yield "}"

    def _diagonals(self) -> Iterator[str]:
        """The function that finds conditions along diagonals: key j, query i: bit count + i - j."""
        chain = sorted(set().union(*[self._along(place) for place in self.words]))
        yield "static void diagonals(ExprFrame& f, Keys& keys) {"
        for place in sorted({arg for at in chain for arg in self.values[at].args}):
            if self.values[place].extent == _WHOLE_TILE:
                kind = _TYPES[self.values[place].kind]
                yield f"  const {kind} v{place} = {self._held(place, '0')};"
        for place in sorted(self.words):
            yield f"  for (u64& word : keys.w{place}) word = 0;"
        yield "  for (int at = 0; at < f.count + f.width; at += kStep) {"
        for place in chain:
            value = self.values[place]
            text = self._computed(place)
            if value.op == "difference":
                ends = [
                    f"wholes(first({self._held(arg, '0')}))"
                    if self.values[arg].extent == _PER_QUERY
                    else f"wholes(keys.v{arg}[0])"
                    for arg in value.args
                ]
                step = "op_add" if self.values[value.args[0]].extent == _PER_QUERY else "op_sub"
                text = f"{step}(op_sub({ends[0]}, {ends[1]}), lanes_from(at - f.count))"
            yield f"    const {_TYPES[value.kind]} v{place} = {text};"
            if place in self.words:
                yield f"    add_bits(keys.w{place}, at, v{place});"
        yield "  }"
        yield "}"

    def _columns(self) -> Iterator[str]:
        """Yield the body of the function that goes through the keys with some columns."""
        use = self.program.use
        yield "  const int width = f.width, count = f.count;"
        yield from self._tile(_PER_PAIR)
        yield from self._queries()
        if any(value.op == "s" for value in self.values):
            yield "  Real* const scores = static_cast<Real*>(f.s);"
            yield "  const Reals scale = reals(f.scale);"
        if use == "score":
            yield "  Score<kV> score(f, from);"
        yield "  for (int j = 0; j < count; j++) {"
        for place in sorted(self._read(_PER_KEY, _PER_PAIR) | self._results(_PER_KEY)):
            kind = _TYPES[self.values[place].kind]
            yield f"    const {kind} v{place} = filled(keys.v{place}[j], {kind}{{}});"
        for place in sorted(self.words):
            yield f"    const u64 row{place} = row_bits(keys.w{place}, count - j) >> from;"
        pairs = [
            at
            for at, value in enumerate(self.values)
            if value.extent == _PER_PAIR and at not in self.hidden
        ]
        for place in pairs:
            if self.values[place].op == "load":
                rows = [
                    f"moved_first(t{place}, {dim}, keys.v{arg}[j])"
                    for dim, arg in self._indices(place, _PER_KEY)
                ]
                yield f"    const i64 row{place} = {' + '.join([f'base{place}', *rows])};"
        yield "    TW_UNROLL(4)"
        yield "    for (int v = 0; v < kV; v++) {"
        yield "      const int at = j * width + from + v * kStep;"
        for place in sorted(self._read(_PER_QUERY, _PER_PAIR) | self._results(_PER_QUERY)):
            yield f"      const {_TYPES[self.values[place].kind]} v{place} = q{place}[v];"
        for place in pairs:
            value = self.values[place]
            yield f"      const {_TYPES[value.kind]} v{place} = {self._computed(place)};"
            if self._is_left(place):
                yield f"      write(f, {_PER_PAIR}, {value.reg}, at, v{place});"
        outputs = self.program.outputs
        if use == "mask":
            yield f"      f.bits[j] |= bits_of_mask<Truth>(v{outputs[0]}) << (from + v * kStep);"
        elif use == "score":
            yield f"      score.put(v, at, v{outputs[0]});"
            if len(outputs) > 1:
                yield f"      score.put_gain(v, at, v{outputs[1]});"
        yield "    }"
        yield "  }"
        if use == "score":
            yield "  score.close();"

    def _tile(self, extent: int) -> Iterator[str]:
        """Write the values of the whole tile that values of an extent need, and their sources."""
        loads = [
            place
            for place, value in enumerate(self.values)
            if value.op == "load" and value.extent == extent
        ]
        read = self._read(_WHOLE_TILE, extent)
        read |= {arg for place in loads for _, arg in self._indices(place, _WHOLE_TILE)}
        if extent == _PER_PAIR:
            read |= self._results(_WHOLE_TILE)
        for place in sorted(read):
            yield f"  const {_TYPES[self.values[place].kind]} v{place} = {self._held(place, '0')};"
        for place in loads:
            value = self.values[place]
            kind = _STORED[value.kind]
            yield f"  const Source<{kind}> t{place} = source<{kind}>(f.tensors[{value.slot}]);"
            yield f"  i64 base{place} = 0;"
            for dim, arg in self._indices(place, _WHOLE_TILE):
                yield f"  base{place} += moved_first(t{place}, {dim}, first(v{arg}));"

    def _queries(self) -> Iterator[str]:
        """Write the values that hold per query of the columns."""
        read = sorted(self._read(_PER_QUERY, _PER_PAIR) | self._results(_PER_QUERY))
        loads = [
            place
            for place, value in enumerate(self.values)
            if value.op == "load" and value.extent == _PER_PAIR and self._indices(place, _PER_QUERY)
        ]
        for place in read:
            yield f"  {_TYPES[self.values[place].kind]} q{place}[kV];"
        for place in loads:
            yield f"  Wholes query{place}[kV];"
        if not read and not loads:
            return
        yield "  TW_UNROLL(4)"
        yield "  for (int v = 0; v < kV; v++) {"
        for place in read:
            yield f"    q{place}[v] = {self._held(place, 'from + v * kStep')};"
        for place in loads:
            terms = [
                f"moved(t{place}, {dim}, {self._held(arg, 'from + v * kStep')})"
                for dim, arg in self._indices(place, _PER_QUERY)
            ]
            yield f"    query{place}[v] = {_sum(terms)};"
        yield "  }"

    def _computed(self, place: int) -> str:
        value = self.values[place]
        match value.op:
            case "s":
                loaded = "load(scores + at)"
                return loaded if self.score == place else f"op_mul({loaded}, scale)"
            case "n":
                return "wholes(n0 + j)"
            case "load":
                return self._picked(place)
            case "difference":
                return f"op_sub(v{value.args[0]}, v{value.args[1]})"
            case "power_by":
                return f"op_power_by(v{value.args[0]}, {_float(value.real)})"
            case "shr_by" | "bits_of":
                return f"op_{value.op}(v{value.args[0]}, {_integer(value.integer)})"
            case "add" | "sub" if self.score in value.args:
                scaled = "op_scaled_" + value.op + ("" if value.args[0] == self.score else "_from")
                other = value.args[1] if value.args[0] == self.score else value.args[0]
                return f"{scaled}(v{self.score}, scale, v{other})"
            case "where" if value.args[0] in self.words:
                return (
                    f"op_where_bits(row{value.args[0]} >> (v * kStep), "
                    f"v{value.args[1]}, v{value.args[2]})"
                )
            case "tanh" if self.program.coarse and self.program.use != "mask":
                return f"op_tanh_coarse(v{value.args[0]})"
            case "div" if self._divides(value.args[1]):
                number = _float(self.values[value.args[1]].real)
                word = "op_over" if self._is_smoothed(place) else "op_div_by"
                return f"{word}(v{value.args[0]}, {number})"
        args = ", ".join([f"v{arg}" for arg in value.args])
        return f"op_{value.op}({args})"

    def _lonely_score(self) -> int:
        """The score's place where one sum is all that uses it: then it is scaled there; else -1."""
        for place, value in enumerate(self.values):
            if value.op == "s":
                users = [user for user in self.values if place in user.args]
                alone = len(users) == 1 and users[0].args.count(place) == 1
                if alone and users[0].op in ("add", "sub") and place not in self.program.outputs:
                    return place
        return -1

    def _divides(self, place: int) -> bool:
        """Return whether it is a constant whose inverse has all bits: far from its type's ends."""
        value = self.values[place]
        return value.op == "constant" and 2.0**-60 < abs(value.real) < 2.0**60

    def _is_smoothed(self, place: int) -> bool:
        """Return whether nothing but functions without steps, and of small slope, see a value."""
        users = {value.op for value in self.values if place in value.args}
        return users <= _SMOOTH and place not in (*self.program.outputs, *self.program.kept)

    def _picked(self, place: int) -> str:
        terms = [f"wholes(row{place})"]
        if self._indices(place, _PER_QUERY):
            terms.append(f"query{place}[v]")
        terms += [f"moved(t{place}, {dim}, v{arg})" for dim, arg in self._indices(place, _PER_PAIR)]
        return f"pick<{_TYPES[self.values[place].kind]}>(t{place}, {_sum(terms)})"

    def _held(self, place: int, at: str) -> str:
        """Return a value of the tile or of its queries."""
        value = self.values[place]
        if value.op == "constant":
            if value.kind == _FLOAT:
                return f"reals({_float(value.real)})"
            if value.kind == _INT:
                return f"wholes({_integer(value.integer)})"
            return f"truths({'true' if value.integer else 'false'})"
        return f"read<{_TYPES[value.kind]}>(f, {value.extent}, {value.reg}, {at})"

    def _listed(self) -> set[int]:
        """Places of the values per key that are kept in arrays, for the columns."""
        indices = {
            arg
            for place, value in enumerate(self.values)
            if value.op == "load" and value.extent == _PER_PAIR
            for _, arg in self._indices(place, _PER_KEY)
        }
        return self._read(_PER_KEY, _PER_PAIR) | self._results(_PER_KEY) | indices

    def _words(self) -> set[int]:
        """Places of conditions along diagonals that choose between floats, and do nothing else."""
        kept = {*self.program.outputs, *self.program.kept}
        found = set()
        for place, value in enumerate(self.values):
            users = [user for user in self.values if place in user.args]
            chooses = all(
                user.op == "where"
                and user.kind == _FLOAT
                and not user.diagonal
                and user.args.count(place) == 1
                for user in users
            )
            if value.kind == _BOOL and value.diagonal and users and chooses and place not in kept:
                found.add(place)
        return {
            place
            for place in found
            if all(self.values[at].op != "load" for at in self._along(place))
        }

    def _along(self, place: int) -> set[int]:
        """Return the places of the values along diagonals that make up one, itself included."""
        found, open_ = set(), [place]
        while open_:
            at = open_.pop()
            if self.values[at].diagonal and at not in found:
                found.add(at)
                open_ += self.values[at].args
        return found

    def _hidden(self) -> set[int]:
        """Places of what nothing but those conditions takes."""
        kept = {*self.program.outputs, *self.program.kept}
        hidden = set(self.words)
        for place in reversed(range(len(self.values))):
            users = {at for at, user in enumerate(self.values) if place in user.args}
            if self.values[place].diagonal and users and users <= hidden and place not in kept:
                hidden.add(place)
        return hidden

    def _of_keys(self) -> list[int]:
        return [place for place, value in enumerate(self.values) if value.extent == _PER_KEY]

    def _indices(self, place: int, extent: int) -> list[tuple[int, int]]:
        """Return the dimensions of a load whose index has that extent, with the index's place."""
        args = self.values[place].args
        return [(dim, arg) for dim, arg in enumerate(args) if self.values[arg].extent == extent]

    def _read(self, extent: int, by: int) -> set[int]:
        """Places of one extent that values of another compute with; indices of loads aside."""
        return {
            arg
            for value in self.values
            if value.extent == by and value.op != "load"
            for arg in value.args
            if self.values[arg].extent == extent
        }

    def _results(self, extent: int) -> set[int]:
        """Places of outputs that are not left in registers."""
        if self.program.use == "loads":
            return set()
        return {place for place in self.program.outputs if self.values[place].extent == extent}

    def _is_left(self, place: int) -> bool:
        """Return whether the value is left in its register."""
        if self.program.use != "loads" or self.values[place].reg < 0:
            return False
        return place in self.program.outputs or place in self.program.kept


_ENTRY = (
    "#pragma GCC visibility push(default)",
    'extern "C" void tilewise_expression(tilewise::ExprFrame*);',
    "#pragma GCC visibility pop",
    'extern "C" void tilewise_expression(tilewise::ExprFrame* f) {',
    "  using namespace tilewise::TILEWISE_ISA;",
    "  Keys keys;",
    "  fill(*f, keys);",
    "  for (int j = 0; f->bits != nullptr && j < f->count; j++) f->bits[j] = 0;",
)


def _sum(terms: list[str]) -> str:
    text = terms[0]
    for term in terms[1:]:
        text = f"op_add({text}, {term})"
    return text


def _integer(value: int) -> str:
    # The least number has no literal.
    return f"({value + 1}LL - 1)" if value == -(2**63) else f"{value}LL"


def _float(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nan("")'
    if math.isinf(value):
        return "__builtin_inf()" if value > 0 else "-__builtin_inf()"
    return value.hex()
