"""The public values ``Mask`` and ``Score``: a program and the tensors it captures, immutable."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

from tilewise.checks import named
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.torch_private import in_forward_level, is_tracked
from tilewise.variants.guidance import named_mask, named_score
from tilewise.variants.program import (
    EXPR,
    RAW,
    Instr,
    Program,
    apart,
    check_mask,
    check_score,
    encode,
    fitted,
    shift_slots,
    slot_count,
)
from tilewise.variants.recognise import in_one_step, mask_program, score_program
from tilewise.variants.trace import trace_mask, trace_score

_Versions: TypeAlias = tuple[int | None, ...]
_M = TypeVar("_M", bound="Mask")


class _Variant:
    """A program with its captured tensors (slot order) and its text form (computed once).

    ``versions`` are those of the captured tensors that a table of tiles was made from, as they were
    then; None for others, and () where no table was made.
    """

    __slots__ = ("captured", "program", "text", "versions")

    program: Program
    captured: tuple[Tensor, ...]
    text: str
    versions: _Versions

    def __init__(self, program: Program, captured: tuple[Tensor, ...] = ()) -> None:
        # Kernels read a slot by its address: one that is not there must never reach them.
        if slot_count(program) != len(captured):
            raise InvalidArgument(
                "captured",
                f"{len(captured)} tensors",
                f"the {slot_count(program)} that the slots of {encode(program)!r} name",
            )
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "captured", captured)
        object.__setattr__(self, "text", encode(program))
        object.__setattr__(self, "versions", ())

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.program, self.captured)

    def __repr__(self) -> str:
        shapes = ", ".join([str(list(tensor.shape)) for tensor in self.captured])
        captured = f", captured: {shapes}" if shapes else ""
        return f"{type(self).__name__}({self.text}{captured})"


class Mask(_Variant):
    """Which pairs (query row m, key n) may attend. Built by ``tilewise.masks``.

    Masks compose: ``a & b`` (both allow), ``a | b`` (either allows), ``~a`` (a does not). A boolean
    tensor or a function ``(b, h, m, n) -> bool`` may stand on either side of ``&`` and ``|``.
    (torch.compile traces ``&`` and ``|``, but does not know ``~`` on a value like this: build
    inverted masks outside of what is compiled.)
    """

    __slots__ = ()

    def __init__(self, program: Program, captured: tuple[Tensor, ...] = ()) -> None:
        check_mask(program)
        super().__init__(program, captured)

    def __and__(self, other: "Mask | Tensor | Callable[..., Any]") -> "Mask":
        return _join(self, other, "and")

    def __or__(self, other: "Mask | Tensor | Callable[..., Any]") -> "Mask":
        return _join(self, other, "or")

    def __rand__(self, other: Tensor | Callable[..., Any]) -> "Mask":
        return as_mask(other) & self

    def __ror__(self, other: Tensor | Callable[..., Any]) -> "Mask":
        return as_mask(other) | self

    def __invert__(self) -> "Mask":
        if not self.program:
            return Mask((Instr("below", (0,)),))  # nothing: the opposite of everything
        program = (*self.program, Instr("not"))
        return _known(Mask, program, self.captured, encode(program), self.versions)

    def __reduce__(self) -> tuple[Any, ...]:
        held = [version is not None for version in self.versions]
        return (*super(Mask, self.current()).__reduce__(), held or None)

    def __setstate__(self, held: list[bool]) -> None:
        now = zip(held, versions_of(self.captured), strict=True)
        versions = tuple([version if one else None for one, version in now])
        object.__setattr__(self, "versions", versions)

    def current(self: _M) -> _M:
        """Itself, unless a tensor that a table was made from was changed: the table may be wrong.

        Raises:
            InvalidArgument: one was changed in place.
        """
        if not self.versions or torch.compiler.is_compiling():
            return self
        now = zip(self.versions, versions_of(self.captured), strict=True)
        if all(then is None or then == version for then, version in now):
            return self
        raise InvalidArgument(
            "mask (BlockMask)",
            "one whose captured tensors were changed in place since it was made",
            "tensors as they were",
            "Make it again with BlockMask.of, or capture a copy.",
        )

    def notes(self) -> tuple[tuple[str, str], ...]:
        """Return facts beyond its program, as (name, text) pairs for ``tilewise.explain``."""
        return ()

    def __bool__(self) -> NoReturn:
        raise InvalidType(
            "mask",
            "a Mask used as a truth value",
            "&, | and ~ to compose masks",
            "Python's 'and', 'or', 'not' would silently drop one of the two; write a & b.",
        )


class Score(_Variant):
    """How a score s = scale * q.k is changed before the softmax. Built by ``tilewise.scores``."""

    __slots__ = ()

    def __init__(self, program: Program, captured: tuple[Tensor, ...] = ()) -> None:
        check_score(program)
        super().__init__(program, captured)


def _join(left: Mask, right: Mask | Tensor | Callable[..., Any], connective: str) -> Mask:
    if not isinstance(right, Mask):
        right = as_mask(right)
    if not left.program or not right.program:  # one of them lets everything through
        other = right if not left.program else left
        return other if connective == "and" else Mask(())
    moved = shift_slots(right.program, len(left.captured))
    program = (*left.program, *moved, Instr(connective))
    versions: _Versions = ()
    if (left.versions or right.versions) and not torch.compiler.is_compiling():
        versions = _or_none(left) + _or_none(right)
    captured = left.captured + right.captured
    return _known(Mask, program, captured, encode(program), versions)


def _or_none(mask: Mask) -> _Versions:
    return mask.versions or (None,) * len(mask.captured)


def versions_of(captured: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return what changes when a tensor is changed in place; inference tensors do not tell."""
    return tuple([-1 if tensor.is_inference() else tensor._version for tensor in captured])


def dense_mask(tensor: Tensor, argument: str = "mask") -> Mask:
    """Return the mask that a boolean tensor spells out (True = attend)."""
    if tensor.dtype is not torch.bool:
        fix = (
            "An additive mask is a score: pass score=tilewise.scores.bias(tensor)."
            if tensor.is_floating_point()
            else f"If 1 means attend, pass {argument}.bool()."
        )
        came, required = f"a tensor of {tensor.dtype}", "torch.bool (True = attend)"
        raise InvalidArgument(argument, came, required, fix)
    if tensor.dim() > 4:
        raise InvalidArgument(
            argument, f"shape {tuple(tensor.shape)}", "broadcastable to [B, Hq, M, N]"
        )
    return Mask(_DENSE, (tensor,))


_V = TypeVar("_V", bound=_Variant)


def mask_of(function: Callable[..., Any]) -> Mask:
    """Return the mask of a function ``(b, h, m, n) -> bool``, as it is now: it is called once."""
    expr, captured = trace_mask(function)
    program, sources, text = mask_program(expr)
    return _known(Mask, program, tuple([captured[slot] for slot in sources]), text)


def score_of(function: Callable[..., Any]) -> Score:
    """Return the score of a function ``(s, b, h, m, n) -> s``, as it is now: it is called once."""
    expr, captured = trace_score(function)
    program, sources, text = score_program(expr, _learned(captured))
    return _known(Score, program, tuple([captured[slot] for slot in sources]), text)


def _learned(captured: tuple[Tensor, ...]) -> tuple[bool, ...]:
    """Return for each tensor whether a gradient or a tangent of it is wanted."""
    learned = tuple([tensor.requires_grad for tensor in captured])
    if torch.compiler.is_compiling() or not in_forward_level():
        return learned
    moved = [is_tracked(tensor) for tensor in captured]
    return tuple([one or other for one, other in zip(learned, moved, strict=True)])


def _known(
    kind: type[_V],
    program: Program,
    captured: tuple[Tensor, ...],
    text: str,
    versions: _Versions = (),
) -> _V:
    """A Mask or Score of a program that was made here: there is nothing to check."""
    found = object.__new__(kind)
    object.__setattr__(found, "program", program)
    object.__setattr__(found, "captured", captured)
    object.__setattr__(found, "text", text)
    object.__setattr__(found, "versions", versions)
    return found


_FULL = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
_DENSE = fitted(mask_of(lambda b, h, m, n: _FULL[b, h, m, n]).program)


def as_mask(value: object) -> Mask:
    """Return a mask from what ``mask=`` takes: a Mask, a boolean tensor or a function."""
    if isinstance(value, Mask):
        return value.current()
    if isinstance(value, Tensor):
        return dense_mask(value)
    if isinstance(value, Score):
        raise InvalidType("mask", "a Score", "a Mask or a boolean tensor", "Pass it as score=.")
    if callable(value) and not isinstance(value, type):
        return mask_of(value)
    required = "a Mask of tilewise.masks, a boolean tensor, or a function (b, h, m, n) -> bool"
    if isinstance(value, str):
        raise InvalidType("mask", f"the text {value!r}", required, named_mask(value))
    raise InvalidType("mask", named(value), required)


def as_score(value: object) -> Score:
    """Return one score for ``score=``: a Score or function, or a sequence applied in order."""
    if isinstance(value, Score):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        steps = [
            each if isinstance(each, Score) else _step(each, index)
            for index, each in enumerate(value)
        ]
        whole = _in_order(*steps)
        return _in_one(whole.program, whole.captured)
    if callable(value) and not isinstance(value, Mask | Tensor | type):
        return score_of(value)
    fix = ""
    if isinstance(value, Tensor):
        fix = "An additive tensor is score=tilewise.scores.bias(tensor)."
    if isinstance(value, Mask):
        fix = "Pass it as mask=."
    if isinstance(value, str):
        fix = named_score(value)
    raise InvalidType(
        "score",
        f"the text {value!r}" if isinstance(value, str) else named(value),
        "a Score of tilewise.scores, a function (s, b, h, m, n) -> s, or a sequence of them",
        fix,
    )


def _step(value: object, index: int) -> Score:
    if callable(value) and not isinstance(value, Mask | Tensor | type):
        return score_of(value)
    required = "a Score of tilewise.scores or a function (s, b, h, m, n) -> s"
    raise InvalidType(f"score[{index}]", named(value), required)


def _in_one(program: Program, captured: tuple[Tensor, ...]) -> Score:
    """A chain of steps: one expression up to the last step that kernels do not know by name.

    Nobody can look into a raw step: what is before it and after it are chains by themselves.
    """
    raw = [index for index, instr in enumerate(program) if instr.op == RAW]
    if raw:
        steps = (program[: raw[0]], program[raw[0] : raw[0] + 1], program[raw[0] + 1 :])
        parts = [_apart(part, captured) for part in steps]
        before, after = (_in_one(*parts[place]) for place in (0, 2))
        return _in_order(before, _known(Score, *parts[1], ""), after)
    unknown = [index for index, instr in enumerate(program) if instr.op == EXPR]
    if not unknown or unknown[-1] == 0:
        return _known(Score, program, captured, encode(program))
    cut = unknown[-1] + 1
    ranks = tuple([tensor.dim() for tensor in captured])
    first, sources, _ = in_one_step(program[:cut], ranks, _learned(captured))
    rest = program[cut:]
    held = slot_count(program[:cut])
    moved = shift_slots(rest, len(sources) - held)
    whole = (*first, *moved)
    tensors = (*[captured[slot] for slot in sources], *captured[held:])
    return _known(Score, whole, tensors, encode(whole))


def _in_order(*steps: Score) -> Score:
    """Scores one after another, as they are."""
    program: Program = ()
    captured: tuple[Tensor, ...] = ()
    for step in steps:
        program += shift_slots(step.program, len(captured))
        captured += step.captured
    return _known(Score, program, captured, encode(program))


def _apart(program: Program, captured: tuple[Tensor, ...]) -> tuple[Program, tuple[Tensor, ...]]:
    """Some steps of a program, with the tensors that they name in slots from 0 on."""
    own, sources = apart(program)
    return own, tuple([captured[slot] for slot in sources])
