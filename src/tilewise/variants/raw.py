"""Scores that are Triton code: a user's own pair of jit functions, registered under a name.

A program holds nothing but the name (``raw(name)[i,j]``, see ``program.py``). The functions stay
in this process, from their registration to its end; a name never changes its meaning, because
plans and compiled kernels are kept by it. Triton is not imported here: a jit function is known by
what it wraps and by the names of its parameters.
"""

import re
from typing import Any, NamedTuple

from tilewise.checks import named
from tilewise.errors import InvalidArgument, InvalidType

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAMETERS = ("s", "b", "h", "m", "n", "M", "N", "tensors", "shapes")


class RawScore(NamedTuple):
    """A registered pair.

    Args:
        score: ``(s, b, h, m, n, M, N, tensors, shapes)`` -> the new scores of a block of pairs.
        derivative: with the same arguments -> d score / d s.
    """

    score: Any
    derivative: Any


_REGISTERED: dict[str, RawScore] = {}


def register_triton(name: str, score: Any, derivative: Any) -> None:
    """Register a pair of ``triton.jit`` functions as the score ``scores.raw(name, *tensors)``.

    Both take ``(s, b, h, m, n, M, N, tensors, shapes)`` and give one float32 for each pair:

    * ``s``: the scores of a block of pairs, float32, scale included and earlier scores applied;
    * ``b``, ``h``: numbers, the batch item (the sequence, in a variable-length call) and the head;
    * ``m``, ``n``: the queries and the keys, int32 blocks that broadcast to the shape of ``s``
      ([BM, 1] and [1, BN], or transposed); ``M``, ``N``: how many that sequence has. Some of a
      block may lie past them: what is loaded there needs a mask;
    * ``tensors``: the tensors that ``scores.raw`` was given, as pointers; ``shapes``: the sizes and
      then the strides of the first one, of the next one, and so on.

    Nothing else may matter to them: tiles come in any order, and again in the backward pass.

    Args:
        name: letters, digits and underscores, not beginning with a digit.
        score: gives the new scores.
        derivative: gives d score / d s.

    Raises:
        InvalidArgument, InvalidType: no name, no jit function, other parameters in number, or
            another pair has this name.
    """
    _check_name(name)
    for argument, function in (("score", score), ("derivative", derivative)):
        _check_function(argument, function)
    held = _REGISTERED.setdefault(name, RawScore(score, derivative))
    if not (_same(held.score, score) and _same(held.derivative, derivative)):
        raise InvalidArgument(
            "name",
            f"{name!r}, which has other functions already",
            "one name for one pair of functions as long as the process runs",
            "Register the new pair under another name.",
        )


def registered(name: str) -> RawScore:
    """Return the pair that a name stands for.

    Raises:
        InvalidArgument: it stands for none in this process.
    """
    found = _REGISTERED.get(name)
    if found is None:
        known = ", ".join([repr(each) for each in _REGISTERED])
        raise InvalidArgument(
            "score (raw)",
            f"the name {name!r}",
            f"a registered name ({known})" if known else "a registered name; there is none so far",
            "Call tilewise.scores.register_triton(name, score, derivative) first; every process "
            "has to.",
        )
    return found


def _check_name(name: object) -> None:
    required = "letters, digits and underscores, not beginning with a digit"
    if not isinstance(name, str):
        raise InvalidType("name", named(name), required)
    if NAME.fullmatch(name) is None:
        raise InvalidArgument("name", repr(name), required)


def _check_function(argument: str, function: object) -> None:
    signature = f"({', '.join(_PARAMETERS)})"
    parameters = getattr(function, "arg_names", None)
    if parameters is None or not hasattr(function, "fn"):
        required = f"a function decorated with @triton.jit, with parameters {signature}"
        raise InvalidType(argument, named(function), required)
    if len(parameters) != len(_PARAMETERS):
        raise InvalidArgument(
            argument, f"{len(parameters)} parameters ({', '.join(parameters)})", f"nine {signature}"
        )


def _same(held: Any, new: Any) -> bool:
    """Return whether two jit functions are one, or have one source and use the same others.

    A cell of a notebook that is run again makes a new object of the same code.
    """
    key = getattr(held, "cache_key", None)
    return held is new or (key is not None and key == getattr(new, "cache_key", None))
