"""The switch that puts tilewise in the place of ``F.scaled_dot_product_attention``.

While a switch is on anywhere, torch's name of the function is this module's ``_stand_in``. It asks
whether a switch is on for the thread that calls, takes the call if nothing speaks against it, and
hands it to the function that was there before if something does; either is written into the
reports of the switches that are on. When the last one goes off, torch's name is what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from tilewise.compat.sdpa_call import Call, attend, cast
from tilewise.compat.sdpa_mistakes import mistake, why_not
from tilewise.errors import TilewiseError, Unsupported
from tilewise.variants.recognise import constant_while_compiling

__all__ = ["Report", "disable", "enable", "sdpa"]

# Not torch._C._nn, where torch itself looks it up when it hands a call to a tensor's class.
_PLACE: Any = torch.nn.functional
_NAME = "scaled_dot_product_attention"
_PLAIN = frozenset((Tensor, Parameter, FakeTensor))


class Report:
    """What a switch saw.

    Args:
        taken: how many calls tilewise computed.
        left: how many calls torch computed, by the reason why tilewise did not.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.left: Counter[str] = Counter()
        self._lock = Lock()

    @property
    def calls(self) -> int:
        """All of them."""
        return self.taken + sum(self.left.values())

    def note(self, reason: str | None) -> None:
        """Count a call that was taken (no reason) or left."""
        with self._lock:
            if reason is None:
                self.taken += 1
            else:
                self.left[reason] += 1

    def __repr__(self) -> str:
        return f"Report(taken={self.taken}, left={dict(self.left)})"

    def __str__(self) -> str:
        lines = [f"{self.taken} of {self.calls} calls taken"]
        lines += [f"  {count} left: {reason}" for reason, count in self.left.most_common()]
        return "\n".join(lines)


class _State:
    """What is switched on in the process, and what was in torch's name before."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.open = 0
        self.everywhere: tuple[Report, ...] = ()
        self.before: Any = torch.nn.functional.scaled_dot_product_attention


_STATE = _State()
_HERE: ContextVar[tuple[Report, ...]] = ContextVar("tilewise_sdpa", default=())
# For torch.compile, which guards on what a module's names hold: whether a switch is on.
_on = False
_WIDEST = 512  # of every backend; torch.compile cannot ask them before the call runs


@contextmanager
def sdpa() -> Iterator[Report]:
    """Let tilewise compute the calls of ``F.scaled_dot_product_attention`` in a block.

    ``with tilewise.sdpa() as report:`` takes the calls of this thread (of this context, in
    asyncio) that it covers, leaves the others to torch, and counts both in ``report``. It nests:
    a call is counted by every block that it is in. Whoever reaches the function by
    ``torch.nn.functional`` is reached: models that say ``F.scaled_dot_product_attention``,
    transformers, timm, ``nn.MultiheadAttention`` while training. Not reached: a name imported from
    there before (``from torch.nn.functional import scaled_dot_product_attention``), and what never
    calls it, as the fast path of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` in
    eval mode (``torch.backends.mha.set_fastpath_enabled(False)`` turns that off).

    A backward pass belongs into the block where checkpoints are computed again in it.

    Under ``torch.compile`` a function is compiled for tilewise while a switch is on, in whatever
    thread, and for torch while none is: which one is guarded on, and the other one made when
    needed. A compiled call counts whenever it is traced, in the reports of the thread that traces,
    and not when it runs.
    """
    report = Report()
    _install()
    token = _HERE.set((*_HERE.get(), report))
    try:
        yield report
    finally:
        _HERE.reset(token)
        _uninstall()


def enable() -> Report:
    """Let tilewise compute the calls of all threads, until ``disable``; a second call does nothing.

    Returns:
        The report that goes on counting; the same one from every call until ``disable``.
    """
    with _STATE.lock:
        if _STATE.everywhere:
            return _STATE.everywhere[0]
        _STATE.everywhere = (Report(),)
        found = _STATE.everywhere[0]
    _install()
    return found


def disable() -> Report:
    """End what ``enable`` began; torch's name is what it was when no ``with`` is open either.

    Returns:
        The report of the calls since ``enable``; an empty one where it was not on.
    """
    with _STATE.lock:
        if not _STATE.everywhere:
            return Report()
        found = _STATE.everywhere[0]
        _STATE.everywhere = ()
    _uninstall()
    return found


def _install() -> None:
    global _on
    with _STATE.lock:
        _STATE.open += 1
        _on = _STATE.open > 0
        if _STATE.open > 1:
            return
        before = getattr(_PLACE, _NAME)
        if before is not _stand_in:
            _STATE.before = before
        setattr(_PLACE, _NAME, _stand_in)


def _uninstall() -> None:
    global _on
    with _STATE.lock:
        _STATE.open -= 1
        _on = _STATE.open > 0
        if _STATE.open:
            return
        if getattr(_PLACE, _NAME) is _stand_in:  # else somebody else has put theirs over it
            setattr(_PLACE, _NAME, _STATE.before)


def _reports() -> tuple[Report, ...]:
    return _HERE.get() + _STATE.everywhere


@constant_while_compiling
def _note_traced(reason: str | None) -> bool:
    """Count, while torch.compile traces, and be nothing of the graph."""
    for report in _reports():
        report.note(reason)
    return True


def _stand_in(*args: Any, **keywords: Any) -> Tensor:
    """What stands in torch's name; whatever is not taken goes to torch as it came."""
    if torch.compiler.is_compiling():
        return _traced(*args, **keywords)
    reports = _reports()
    if not reports:
        found: Tensor = _STATE.before(*args, **keywords)
        return found
    reason, out = _tried(args, keywords)
    for report in reports:
        report.note(reason)
    return _STATE.before(*args, **keywords) if reason is not None or out is None else out


_stand_in.__name__ = _stand_in.__qualname__ = _NAME
_stand_in.__doc__ = torch.nn.functional.scaled_dot_product_attention.__doc__


def _traced(*args: Any, **keywords: Any) -> Tensor:
    """A call that torch.compile traces: what speaks against it is asked before, not after."""
    if not _on:
        found: Tensor = _STATE.before(*args, **keywords)
        return found
    call = cast(Call(*args, **keywords))
    reason = _against(call)
    if reason is None and max(call.query.shape[-1], call.value.shape[-1]) > _WIDEST:
        reason = f"a width over {_WIDEST}"
    _note_traced(reason)
    return attend(call) if reason is None else _STATE.before(*args, **keywords)


def _tried(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[str | None, Tensor | None]:
    """The reason why not, or the output."""
    try:
        call = Call(*args, **keywords)
        if not isinstance(call.query, Tensor):
            return "what torch refuses (types)", None
        call = cast(call)
    except (TypeError, AttributeError):
        return "what torch refuses (types)", None
    reason = _against(call)
    if reason is not None:
        return reason, None
    try:
        return None, attend(call)
    except Unsupported as error:  # raised before anything is computed
        return _reason(error), None
    except TilewiseError as error:
        return str(error), None


def _against(call: Call) -> str | None:
    """What speaks against a call, as far as its arguments tell."""
    wrong = mistake(call)
    if wrong is not None:
        return f"what torch refuses ({wrong})"
    for x in (call.query, call.key, call.value, call.attn_mask):
        if x is not None and type(x) not in _PLAIN and not (x.is_nested or _compiling()):
            return f"a tensor of another class ({type(x).__name__})"
    return why_not(call)


def _compiling() -> bool:
    return torch.compiler.is_compiling()


def _reason(error: Unsupported) -> str:
    """Why no backend took it, without the sizes of the call."""
    reasons = [f"backend {name!r}: {why}" for name, whys in error.reasons.items() for why in whys]
    return "; ".join(reasons) or error.what
