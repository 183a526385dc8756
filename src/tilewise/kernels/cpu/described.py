"""The program of an expression as the core describes it to what writes code for it."""

from __future__ import annotations

from typing import NamedTuple

WHOLE_TILE, PER_QUERY, PER_KEY, _PER_DIAGONAL, PER_PAIR = range(5)


class Value(NamedTuple):
    """One value of a program.

    Args:
        op: its operation, as in variants/operations.py but for "constant", "load", the quotients by
            powers of two "shr_by" and "bits_of", "power_by" and "difference" (of positions).
        kind: 0 boolean, 1 integer, 2 float.
        arg_kind: of its last argument.
        extent: what it depends on: 0 nothing in the tile, 1 the query, 2 the key, 4 both.
        args: places of its arguments; of a load, one index per dimension.
        reg: its register among those of its extent; -1 for the score.
        slot: of a load.
        integer, real: of a constant; the number of bits of "shr_by", the bits of "bits_of", the
            exponent of "power_by".
        diagonal: whether it depends on the difference of query and key alone.
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
    diagonal: bool = False


class Program(NamedTuple):
    """A program as the core describes it.

    Args:
        isa: the instruction set that it is for.
        float_bits, int_bits: widths.
        coarse: whether operands and results have 16 bits.
        use: "mask" (one bit per pair), "score" (the score, and its derivative if there are two
            outputs) or "loads" (outputs and kept values are left in registers).
        values: by extent, each after its arguments.
        outputs, kept: places.
    """

    isa: str
    float_bits: int
    int_bits: int
    coarse: bool
    use: str
    values: tuple[Value, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...]


def program_of(described: tuple[object, ...]) -> Program:
    """Return the program from the core's plain tuples."""
    program = Program(*described)  # type: ignore[arg-type]
    values = []
    for value in [Value(*each) for each in program.values]:
        # What depends on the diagonal is computed per pair, and its register is the interpreter's.
        if value.extent == _PER_DIAGONAL:
            value = value._replace(extent=PER_PAIR, reg=-1, diagonal=True)
        values.append(value)
    return program._replace(values=tuple(values))
