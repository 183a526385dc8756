"""Whether a case holds: the 2x rule against float64, and the same bits again.

The rule is the repository's (``tests/contract.py``), and so is what it does about luck: the
largest of a few errors says little, so an excess must show again on fresh numbers, several draws
taken together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilewise._core as core
from tests.contract import InexactError, as_long, assert_exact, assert_same_bits
from tests.fuzz.build import Call, build, dtype_of, run
from tests.fuzz.case import Case
from tests.fuzz.memory import Guarded, Heap
from tests.fuzz.reference import Outcome, plain, wider

# An excess that no luck explains, in an output of so many numbers, where no branch hangs on a
# rounded number.
CERTAIN, MANY = 16.0, 256
# An excess beyond this is no rounding: its kind is "wrong", of others "inexact".
GROSS = 100.0
# Scores beyond this, such as s ** 9, leave float64 too few digits to tell one formula from another.
_TELLING = 1e8


class FaultError(AssertionError):
    """What a case does wrong; ``kind`` is one word for what went wrong."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ExcessError(InexactError):
    """An output of ``count`` numbers is over the bound."""

    def __init__(self, message: str, ratio: float, output: str, count: int) -> None:
        super().__init__(message, ratio)
        self.output = output
        self.count = count


class Judged:
    """One draw of a case: what the call gave, and both references."""

    def __init__(self, case: Case, heap: Heap) -> None:
        self.case = case
        self.call = build(case, heap)
        before = {name: tensor.detach().clone() for name, tensor in self.call.operands().items()}
        self.got = _run(case, self.call)
        for name, tensor in self.call.operands().items():
            _same("wrote", tensor.detach(), before[name], f"the call wrote into {name}")
        dtype = dtype_of(case)
        self.plain = plain(case, self.call, dtype)
        if dtype == torch.float64:
            self.oracle = wider(case, self.call)
        else:
            self.oracle = plain(case, self.call, torch.float64)


def _run(case: Case, call: Call) -> dict[str, Tensor]:
    try:
        return run(case, call)
    except Exception as error:
        raise FaultError(type(error).__name__, f"{type(error).__name__}: {error}") from error


def _same(kind: str, actual: Tensor, expected: Tensor, what: str) -> None:
    try:
        if actual.is_floating_point():
            assert_same_bits(actual, expected, what)
        elif not torch.equal(actual, expected):
            raise AssertionError(f"{what}: other integers")
    except AssertionError as error:
        raise FaultError(kind, str(error)) from error


def check(case: Case, guard: str = "") -> None:
    """Raise ``FaultError`` if a case does not hold.

    Args:
        case: what to call.
        guard: "end" or "begin" lays every tensor against a page that kills who touches it.
    """
    heap = Guarded(guard) if guard else Heap()
    before = core.isa_active(), torch.get_num_threads()
    core.set_isa(isa_of(case))
    torch.set_num_threads(case.threads)
    try:
        judged = Judged(case, heap)
        _check_values(case, judged, heap)
        _check_bits(case, judged)
    finally:
        judged = None  # type: ignore[assignment]
        heap.free()
        core.set_isa(before[0])
        torch.set_num_threads(before[1])


def isa_of(case: Case) -> str:
    """The case's instruction set, or the best of a machine that does not have it."""
    available = list(core.isa_available())
    return case.isa if case.isa in available else str(available[0])


def _check_bits(case: Case, judged: Judged) -> None:
    """The same call with other threads, which is also the same call again."""
    others = 1 if case.threads > 1 else 2
    torch.set_num_threads(others)
    again = _run(case, judged.call)
    torch.set_num_threads(case.threads)
    for name, value in judged.got.items():
        what = f"{name} with {case.threads} and with {others} threads"
        _same("bits", again[name], value, what)


def _check_values(case: Case, judged: Judged, heap: Heap) -> None:
    if dtype_of(case) == torch.float64:
        _check_question(case, judged)
    over = list(_excesses([judged]))
    for error in over:
        if error.ratio > CERTAIN and error.count >= MANY and not case.kinked:
            raise _over(error) from error
    if over:
        _confirm(case, heap, over[0].count)
    _check_top(judged)


def _confirm(case: Case, heap: Heap, count: int) -> None:
    """Raise ``FaultError`` if an excess of an output with ``count`` numbers shows again.

    First on several draws taken together, then in most of nine draws alone, then in most of 41:
    under large logits few pairs have all the error, and a maximum of few says little about the one
    or the other. A few cases of 20,000 have an excess in a third of all draws, though their errors
    are those of plain torch on average. Nine draws alone would blame one of these in ten. It is one
    output that must be over in most draws: of seven such outputs, some one is over in half of them.
    """
    draws = max(4, min(64, 2000 // (1 + count)))
    if not case.kinked:
        over = list(_excesses(_fresh(case, heap, 1, draws)))
        if not over:
            return
        for error in over:
            if error.ratio > CERTAIN and error.count >= MANY:
                raise _over(error) from error
    found: defaultdict[str, list[ExcessError]] = defaultdict(list)
    tried = 0
    for more in (9, 32):
        for draw in _fresh(case, heap, 1 + draws + tried, more):
            for error in _excesses([draw]):
                found[error.output].append(error)
        tried += more
        most = max(found.values(), key=len, default=[])
        if 2 * len(most) <= tried:
            return
    raise _over(most[-1]) from most[-1]


def _over(error: InexactError) -> FaultError:
    return FaultError("wrong" if error.ratio > GROSS else "inexact", str(error))


def _fresh(case: Case, heap: Heap, first: int, count: int) -> list[Judged]:
    """The same case with other numbers."""
    return [
        Judged(replace(case, values=case.values + 1_000_003 * (first + i)), heap)
        for i in range(count)
    ]


def _excesses(draws: list[Judged]) -> Iterator[ExcessError]:
    """Yield an error for each output over the contract's bound, of draws taken as one problem."""
    for name in draws[0].got:
        if name == "top1":
            continue
        got = [draw.got[name] for draw in draws]
        naive = [draw.plain.named[name] for draw in draws]
        truth = [draw.oracle.named[name] for draw in draws]
        actual = torch.stack([tensor.contiguous() for tensor in got])
        plain_values, true = (np.stack([as_long(each) for each in x]) for x in (naive, truth))
        # Unspecified: what float16 cannot hold, and what overflows in the plain formula.
        beyond = np.isfinite(true) & (np.abs(true) > torch.finfo(actual.dtype).max / 2)
        beyond |= np.isfinite(true) & ~np.isfinite(plain_values)
        if beyond.any():
            actual = torch.where(torch.from_numpy(beyond), 0.0, actual)
            true, plain_values = (np.where(beyond, 0, each) for each in (true, plain_values))
        try:
            assert_exact(actual, torch.from_numpy(plain_values.astype(np.float64)), true, name)
        except InexactError as error:
            yield ExcessError(str(error), error.ratio, name, got[0].numel())
        except AssertionError as error:
            raise FaultError("special", str(error)) from error


def _check_question(case: Case, judged: Judged) -> None:
    """Both references of a float64 case agree, so that the library traced what was written."""
    known = [s.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs() for s in judged.plain.scores]
    largest = max((s.max().item() for s in known if s.numel()), default=0.0)
    if case.kinked or largest > _TELLING:
        return
    for name in judged.got:
        if name == "top1":
            continue
        one, other = (as_long(x.named[name]) for x in (judged.plain, judged.oracle))
        with np.errstate(invalid="ignore"):
            gap = np.where(one == other, 0, np.abs(one - other))
        largest = np.abs(other[np.isfinite(other)]).max(initial=1.0)
        if not bool((gap <= 1e-6 * largest).all()):
            raise FaultError("meaning", f"{name}: the plain formula and the extended one disagree")


def _check_top(judged: Judged) -> None:
    """The top key is one whose score is the largest but for rounding."""
    top = judged.got.get("top1")
    if top is None:
        return
    outcome: Outcome = judged.plain
    if judged.oracle.scores:
        outcome = judged.oracle
    rows = judged.got["max_logit"]
    first = 0
    for s in outcome.scores:
        length = s.shape[2]
        if judged.call.starts is None:
            keys, highest = top, rows
        else:
            span = slice(first, first + length)
            keys, highest = top[None, :, span], rows[None, :, span]
        first += length
        dead = highest == -torch.inf
        if not bool(((keys == -1) == dead).all()):
            raise FaultError("top1", "-1 in other places than -inf in max_logit")
        if s.shape[-1] == 0:
            continue
        chosen = s.gather(-1, keys.clamp(min=0)[..., None])[..., 0].double()
        slack = 1e-5 * (1 + s[s.isfinite()].abs().amax().double()) if s.isfinite().any() else 0.0
        worse = (~dead) & (chosen < s.amax(-1).double() - slack)
        if not bool(worse.any()) or judged.case.kinked:
            continue
        # sin(s ** 3) has few true digits in float32: plain torch's error says how many.
        worse &= chosen < s.amax(-1).double() - slack - 2 * _score_error(judged)
        if bool(worse.any()):
            raise FaultError("top1", f"{int(worse.sum())} rows name a key that is not the largest")


def _score_error(judged: Judged) -> float:
    """The largest error of a score that plain torch computes in float32; 0 for a float64 case."""
    if not judged.oracle.scores:
        return 0.0
    rounded = plain(judged.case, judged.call, torch.float32).scores
    pairs = zip(rounded, judged.oracle.scores, strict=True)
    errors = [(one.double() - true).nan_to_num(0.0, 0.0, 0.0).abs() for one, true in pairs]
    return max((each.amax().item() for each in errors if each.numel()), default=0.0)


def describe(error: BaseException) -> tuple[str, str]:
    """The kind and the words of what a check raised."""
    kind: Any = getattr(error, "kind", type(error).__name__)
    return str(kind), str(error)
