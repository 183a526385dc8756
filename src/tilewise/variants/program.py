"""Masks and scores as data: postfix programs, and their text form.

A program is a tuple of instructions in postfix order. It holds no tensor: what a variant captures
travels beside it, and an instruction names its tensors by slot (the index into that list).

Mask leaves (they push one boolean per pair of query row m and key n)::

    band(left, right, anchor)     a + m - left <= n <= a + m + right; -1 means open;
                                  a = N - M for anchor 1 (bottom right), 0 for anchor 0
    below(length) | below()[i]    n < length, a number or the int64 tensor [B] in slot i
    same_document()[i,j]          ids_i[b, m] == ids_j[b, n], int64 [B|1, M] and [B|1, N]
    dense()[i]                    a boolean tensor [B|1, Hq|1, M|1, N|1]
    blocks(q,k)[i]                a boolean per rectangle of q queries x k keys, a tensor
                                  [B|1, Hq|1, ceil(M/q), ceil(N/k)]

Mask connectives (they pop and push booleans): ``and``, ``or``, ``not``.

What changes nothing, but is known of the boolean before it::

    tiles(q,k,B,H,M,N,w)[i]       of each rectangle of q queries x k keys whether the mask hides
                                  all of its pairs (0), some (1) or none (2), a uint8 tensor
                                  [B|1, Hq|1, ceil(M/q), ceil(N/k)]. It holds for M queries and
                                  N keys, for B batch items, H heads and floats of width w
                                  (1: float32, 2: float64), 0 where any will do; of a
                                  variable-length call for the lengths in [i, j, k]

Score steps (each maps the running score s of a pair)::

    alibi()[i]                    s - slope_i[b, h] * |m + (N - M) - n|
    softcap(cap)                  cap * tanh(s / cap)
    bias()[i]                     s + bias_i[b, h, m, n], a tensor [B|1, Hq|1, M|1, N|1]
    raw(name)[i,j]                the Triton functions registered as name (raw.py), with
                                  any number of tensors

In both::

    expr{...}[i,j]                any expression of variants/expr.py: a leaf of a mask, the
                                  first step of a score or the first one after a raw; slots
                                  in its text count in [i, j]

A tensor that a user indexed is named by another form: ``below(1)[i]``, ``same_document(1)[i,j]``,
and ``dense(1,axes)[i]``, ``bias(1,axes)[i]``, ``alibi(1,axes)[i]`` with the position that indexes
each dimension (0 to 3 for b, h, m, n; 4 for the constant 0). It may be longer than the call needs,
or shorter: then its last element counts for all that follow. The other forms fit exactly.
"""

import math
import re
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from tilewise.errors import InvalidArgument
from tilewise.variants import expr as expressions
from tilewise.variants.raw import NAME, registered

Number: TypeAlias = int | float | str


class Instr(NamedTuple):
    """One instruction: an operation, its constants, and the slots of its captured tensors."""

    op: str
    params: tuple[Number, ...] = ()
    slots: tuple[int, ...] = ()


Program: TypeAlias = tuple[Instr, ...]


class _Form(NamedTuple):
    """Form of an operation: (params, slots) counts, and the effect on the stack."""

    arities: tuple[tuple[int, int], ...]
    pops: int = 0


EXPR = "expr"
RAW = "raw"
BY_USER = 1  # the first parameter of the forms of tensors that a user indexed
MOST_AXES = 6
_ANY_AXES = tuple([(1 + axes, 1) for axes in range(1, MOST_AXES + 1)])


MASK_OPS: dict[str, _Form] = {
    "band": _Form(((3, 0),)),
    "below": _Form(((1, 0), (0, 1), (1, 1))),
    "same_document": _Form(((0, 2), (1, 2))),
    "dense": _Form(((0, 1), *_ANY_AXES)),
    EXPR: _Form(()),
    "and": _Form(((0, 0),), pops=2),
    "or": _Form(((0, 0),), pops=2),
    "not": _Form(((0, 0),), pops=1),
    "blocks": _Form(((2, 1),)),
    "tiles": _Form(((7, 1), (7, 3)), pops=1),
}
SCORE_OPS: dict[str, _Form] = {
    "alibi": _Form(((0, 1), *_ANY_AXES)),
    "softcap": _Form(((1, 0),)),
    "bias": _Form(((0, 1), *_ANY_AXES)),
    EXPR: _Form(()),
    RAW: _Form(()),
}
# Constants of masks that are larger mean the same for any problem that memory holds. Kernels add
# them to positions in 64 bits.
LARGEST_COUNT = 2**40
_CONNECTIVES = ("and", "or", "not")
_TOKEN = re.compile(r"([a-z_]+)(?:\(([^()]*)\)(?:\[([0-9,]+)\])?)?")
_EXPR_TOKEN = re.compile(r"expr\{([^{}]*)\}(?:\[([0-9,]+)\])?")


def encode(program: Program) -> str:
    """The text of a program, e.g. ``"band(-1,0,1) below()[0] and"``; ``""`` for the empty one."""
    return " ".join([_encode_one(instr) for instr in program])


def _encode_one(instr: Instr) -> str:
    if instr.op in _CONNECTIVES:
        return instr.op
    slots = ",".join([str(slot) for slot in instr.slots])
    if instr.op == EXPR:
        return f"expr{{{instr.params[0]}}}" + (f"[{slots}]" if slots else "")
    if instr.op == RAW:
        return f"raw({instr.params[0]})" + (f"[{slots}]" if slots else "")
    params = ",".join([repr(value) for value in instr.params])
    return f"{instr.op}({params})[{slots}]" if slots else f"{instr.op}({params})"


@lru_cache(maxsize=1024)
def decode(text: str) -> Program:
    """Return the program that a text stands for: ``decode(encode(p)) == p``.

    Raises:
        InvalidArgument: the text is not a program, or its stack does not come out even.
    """
    program = tuple([_decode_one(token, text) for token in text.split()])
    _check_stack(program, text)
    return program


def _decode_one(token: str, text: str) -> Instr:
    found = _EXPR_TOKEN.fullmatch(token)
    if found is not None:
        named = tuple([int(part) for part in found[2].split(",")]) if found[2] else ()
        instr = Instr(EXPR, (found[1],), named)
        _check_form(instr, MASK_OPS[EXPR])
        return instr
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise InvalidArgument("program", f"{token!r} in {text!r}", "op(params)[slots]")
    op, params_text, slots_text = match.groups()
    form = MASK_OPS.get(op) or SCORE_OPS.get(op)
    if form is None:
        known = ", ".join([*MASK_OPS, *SCORE_OPS])
        raise InvalidArgument("program", f"the operation {op!r}", f"one of {known}")
    try:
        params: tuple[Number, ...] = ()
        if op == RAW:
            params = (params_text or "",)
        elif params_text:
            params = tuple([_number(part) for part in params_text.split(",")])
        slots = tuple([int(part) for part in slots_text.split(",")]) if slots_text else ()
    except ValueError:
        raise InvalidArgument("program", repr(token), "numbers as parameters and slots") from None
    instr = Instr(op, params, slots)
    _check_form(instr, form)
    return instr


def _number(text: str) -> Number:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _check_stack(program: Program, text: str) -> None:
    """A mask leaves exactly one boolean; a score program is a plain sequence of steps."""
    first = program[0] if program else None
    by_name = first is not None and first.op in SCORE_OPS and first.op != EXPR
    if by_name or (first is not None and first.op == EXPR and _kind(first) == "float"):
        check_score(program, repr(text))
    else:
        check_mask(program, repr(text))


def check_mask(program: Program, text: str = "") -> None:
    """A mask's program has known operations, whole and small constants, and leaves one boolean.

    ``text`` is what to call it in an error; its own form if empty.

    Raises:
        InvalidArgument: it is no such program.
    """
    depth = 0
    for instr in program:
        form = MASK_OPS.get(instr.op)
        if form is None:
            raise InvalidArgument("program", text or repr(program), "mask operations only")
        _check_form(instr, form)
        if instr.op == EXPR and _kind(instr) != "bool":
            raise InvalidArgument("program", repr(instr), "an expression that gives a boolean")
        for value in () if instr.op == EXPR else instr.params:
            if not isinstance(value, int) or not -1 <= value <= LARGEST_COUNT:
                raise InvalidArgument(
                    "program", repr(instr), f"whole constants from -1 to {LARGEST_COUNT}"
                )
        depth -= form.pops
        if depth < 0:
            raise InvalidArgument(
                "program", text or repr(program), f"{form.pops} operands before {instr.op}"
            )
        depth += 1
    if program and depth != 1:
        raise InvalidArgument(
            "program", text or repr(program), f"one value at the end, not {depth}"
        )


def check_score(program: Program, text: str = "") -> None:
    """A score's program is a sequence of score steps, each with its own constants and slots.

    ``text`` is what to call it in an error; its own form if empty.

    Raises:
        InvalidArgument: it is no such program.
    """
    for index, instr in enumerate(program):
        form = SCORE_OPS.get(instr.op)
        if form is None:
            raise InvalidArgument("program", text or repr(program), "score steps only")
        _check_form(instr, form)
        is_first = index == 0 or program[index - 1].op == RAW
        if instr.op == EXPR and not (is_first and _kind(instr) == "float"):
            required = "an expression as the first step (or after raw) only, and of one float"
            raise InvalidArgument("program", repr(instr), required)
        for value in instr.params if instr.op == "softcap" else ():
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise InvalidArgument("program", repr(instr), "finite constants above 0")


def fitted(program: Program) -> Program:
    """The program for tensors that fit exactly or broadcast: of built-ins, and lowered ones."""
    return tuple(
        [
            Instr(instr.op, (), instr.slots)
            if instr.op not in (EXPR, RAW, "softcap", "band", "blocks", "tiles") and instr.slots
            else instr
            for instr in program
        ]
    )


def _kind(instr: Instr) -> str:
    """Return the kind of what the expression of an instruction gives."""
    expr = expressions.decode(str(instr.params[0]))
    return expressions.kinds(expr)[expr.outputs[0]]


def _check_form(instr: Instr, form: _Form) -> None:
    if instr.op == EXPR:
        _check_expr(instr)
    elif instr.op == RAW:
        _check_raw(instr)
    elif (len(instr.params), len(instr.slots)) not in form.arities:
        raise InvalidArgument("program", repr(instr), f"(params, slots) in {form.arities}")
    for slot in instr.slots:
        if slot < 0:
            raise InvalidArgument("program", repr(instr), "slots from 0")


def _check_expr(instr: Instr) -> None:
    if len(instr.params) != 1 or not isinstance(instr.params[0], str):
        raise InvalidArgument("program", repr(instr), "the text of an expression")
    named = expressions.slots_of(expressions.decode(instr.params[0]))
    if named != list(range(len(instr.slots))):
        raise InvalidArgument("program", repr(instr), f"the {len(named)} slots of its expression")


def _check_raw(instr: Instr) -> None:
    name = instr.params[0] if len(instr.params) == 1 else None
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise InvalidArgument("program", repr(instr), "the name of a registered score")
    registered(name)


def apart(program: Program) -> tuple[Program, tuple[int, ...]]:
    """Return steps with slots from 0 on, each with its own, and the slots that these were."""
    instrs: list[Instr] = []
    sources: list[int] = []
    for instr in program:
        slots = tuple(range(len(sources), len(sources) + len(instr.slots)))
        instrs.append(Instr(instr.op, instr.params, slots))  # torch.compile has no _replace
        sources += instr.slots
    return tuple(instrs), tuple(sources)


def slot_count(program: Program) -> int:
    """Return how many captured tensors a program names: its largest slot and one."""
    slots = [slot for instr in program for slot in instr.slots]
    return max(slots) + 1 if slots else 0


def shift_slots(program: Program, by: int) -> Program:
    """The same program with every slot moved up, for appending its captures to a longer list."""
    if by == 0:
        return program
    moved = []
    for instr in program:  # torch 2.11's Dynamo does not unpack one of these
        slots = tuple([slot + by for slot in instr.slots]) if instr.slots else ()
        moved.append(Instr(instr.op, instr.params, slots))
    return tuple(moved)
