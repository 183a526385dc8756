"""``scaled_dot_product_attention`` by torch's signature, and what puts it in torch's place.

Three ways to it, each asked for (importing this module patches nothing):

* ``tilewise.compat.sdpa.scaled_dot_product_attention`` is a function to call;
* ``with tilewise.sdpa():`` takes the calls of a block, ``enable()`` and ``disable()`` those of the
  process;
* ``torch.nn.attention.activate_flash_attention_impl("tilewise")`` makes it torch's flash kernel
  (``flash_impl.py``); the name is known to torch once this module is imported.

While a switch is on anywhere, torch's name of the function is a stand-in of this module. It
checks whether a switch is on for the calling thread. If so, it takes the call when tilewise covers
it, and otherwise passes it to the function that was there before. Either outcome is counted in the
reports of the switches that are on. When the last switch goes off, torch's name is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.nn import Parameter

from tilewise.compat.sdpa_call import (
    TORCH,
    Call,
    attend,
    attend_usual,
    cast,
    is_usual,
    mistake,
    raise_as_torch,
    raise_unsupported,
    why_not,
)
from tilewise.errors import TilewiseError, Unsupported
from tilewise.preference import Report, slower
from tilewise.torch_private import FakeTensor, constant_while_compiling
from tilewise.variants.values import Score

__all__ = ["Report", "disable", "enable", "scaled_dot_product_attention", "sdpa"]


def _activate() -> Any:
    from tilewise.compat.flash_impl import activate  # it takes a while, and few want it

    return activate()


torch.nn.attention.register_flash_attention_impl("tilewise", register_fn=_activate)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run torch's ``scaled_dot_product_attention`` by ``tilewise.attention``, in O(L + S) memory.

    ``softmax(scale query key^T + attn_mask) value``, over the last two dimensions.

    Torch's own paths differ from one another in these cases; this function does the following:

    * A row that sees no key gives 0, with zero gradients. This holds for a bool mask, -inf in a
      float mask, and S = 0. Every path of torch 2.13 does so on the CPU.
    * ``attn_mask`` together with ``is_causal`` is refused, as torch's page says and its plain path
      does; its flash kernel on the CPU applies both.
    * NaN: a NaN query, and a NaN key or value that is attended, give NaN. A hidden value counts as
      0 * NaN inside of a computed tile, as in torch. A hidden NaN key does not: torch's plain path
      spreads it (NaN - inf), its flash kernel with ``is_causal`` does not either.
    * Dropout draws from torch's generator, so that ``torch.manual_seed`` repeats it, but not the
      numbers that torch draws.

    Args:
        query: [.., Hq, L, E], two dimensions or more; what stands before L and E broadcasts.
        key: [.., H, S, E].
        value: [.., H, S, Ev]. All three of one dtype: float32, bfloat16, float16 or float64; or
            all three jagged nested tensors [B, H, j, E], without attn_mask.
        attn_mask: broadcasts to the scores [.., Hq, L, S]: bool (True = attend), or floats to be
            added, float32 or query's dtype, with a gradient.
        dropout_p: in [0, 1]; not switched off by anything: pass 0.0 when evaluating.
        is_causal: row m sees keys 0 to m: top left aligned, whatever L and S are.
        scale: 1/sqrt(E) if None.
        enable_gqa: heads of key and value (dimension -3) divide those of query, and each serves
            a group of them.

    Returns:
        [.., Hq, L, Ev] in query's dtype.

    Raises:
        RuntimeError, TypeError, IndexError: torch's own, for what torch refuses.
        Unsupported: what torch computes and nothing here does, with the reason.

    Source: https://docs.pytorch.org/docs/stable/generated/
    torch.nn.functional.scaled_dot_product_attention.html
    """
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not torch.compiler.is_compiling() and is_usual(call):
        return attend_usual(call)
    if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
        call = cast(call)
    wrong = mistake(call)
    if wrong is not None:
        raise_as_torch(call, wrong)
    uncovered = why_not(call)
    if uncovered is not None:
        raise_unsupported(call, uncovered)
    return attend(call)


_PLAIN = frozenset((Tensor, Parameter, FakeTensor))
_WIDEST = 512  # of every backend; torch.compile cannot ask them before the call runs


def take(
    args: tuple[Any, ...], keywords: dict[str, Any], more: tuple[Score, ...] = ()
) -> tuple[str | None, Tensor | None]:
    """The output of a call, or the reason why tilewise does not compute it; one of them is None.

    Scores in ``more`` apply after what the call says: those of layers of a model that
    ``tilewise.integrations.timm`` switched.
    """
    if not torch.compiler.is_compiling():
        return _tried(args, keywords, more)
    call = cast(Call(*args, **keywords))
    reason = _against(call)  # asked before, and not after
    if reason is None and max(call.query.shape[-1], call.value.shape[-1]) > _WIDEST:
        reason = f"a width over {_WIDEST}"
    return (None, attend(call, more)) if reason is None else (reason, None)


def _tried(
    args: tuple[Any, ...], keywords: dict[str, Any], more: tuple[Score, ...]
) -> tuple[str | None, Tensor | None]:
    try:
        call = Call(*args, **keywords)
        if not isinstance(call.query, Tensor):
            return "what torch refuses (types)", None
        if not more and is_usual(call):
            faster = slower(call.query, call.key, call.value)
            return (faster, None) if faster else (None, attend_usual(call))
        call = cast(call)
    except Unsupported as error:  # raised before anything is computed
        return _reason(error), None
    except (TypeError, AttributeError):
        return "what torch refuses (types)", None
    reason = _against(call)
    if reason is not None:
        return reason, None
    try:
        return None, attend(call, more)
    except Unsupported as error:
        return _reason(error), None
    except TilewiseError as error:
        return str(error), None


def _against(call: Call) -> str | None:
    """Return what speaks against a call, as far as its arguments tell."""
    wrong = mistake(call)
    if wrong is not None:
        return f"what torch refuses ({wrong})"
    compiling = torch.compiler.is_compiling()
    for x in (call.query, call.key, call.value, call.attn_mask):
        if x is not None and type(x) not in _PLAIN and not (x.is_nested or compiling):
            return f"a tensor of another class ({type(x).__name__})"
    return why_not(call)


def _reason(error: Unsupported) -> str:
    """Return why no backend took it, without the sizes of the call."""
    reasons = [f"backend {name!r}: {why}" for name, whys in error.reasons.items() for why in whys]
    return "; ".join(reasons) or error.what


# Not torch._C._nn, where torch itself looks it up when it hands a call to a tensor's class.
_PLACE: Any = torch.nn.functional
_NAME = "scaled_dot_product_attention"


class _Called(Report):
    """A report that says what to do where nothing was called, and whether its block has ended."""

    ended = False

    def __str__(self) -> str:
        if self.calls:
            return super().__str__()
        return (
            f"{super().__str__()}\n"
            "  nothing called torch.nn.functional.scaled_dot_product_attention by that name\n"
            "  torch's own attention modules may not call it: tilewise.nn.convert(model)"
        )


class _Place:
    """A function that stood at torch's name (``before``), and the one that stands in for it.

    Whoever wraps a stand-in in one block, and leaves that at torch's name, is what stood there
    before the next block. So each stand-in passes calls on to a function of its own: one of all
    would be called by what it calls.
    """

    def __init__(self, before: Callable[..., Tensor]) -> None:
        self.before = before
        self.on = False  # torch.compile guards on it
        self.stand_in = _standing_in(self)


class _State:
    """State of the process: what is switched on, and what torch's name held before."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.open = 0
        self.everywhere: tuple[_Called, ...] = ()
        self.places: list[_Place] = []


_STATE = _State()


_HERE: ContextVar[tuple[_Called, ...]] = ContextVar("tilewise_sdpa", default=())


@contextmanager
def sdpa() -> Iterator[Report]:
    """Let tilewise compute the calls of ``F.scaled_dot_product_attention`` in a block.

    ``with tilewise.sdpa() as report:`` takes the calls of this thread (of this context, in asyncio)
    that it covers, leaves the others to torch, and counts both in ``report``. It nests: a call is
    counted by every block that it is in. It also leaves the few calls that torch computes faster,
    unless ``tilewise.prefer("tilewise")`` was said.

    The switch reaches every caller of ``torch.nn.functional``: models that write
    ``F.scaled_dot_product_attention``, transformers, timm, ``nn.MultiheadAttention`` while
    training. It does not reach two kinds of code:

    * a name imported from there before
      (``from torch.nn.functional import scaled_dot_product_attention``);
    * code that never calls it, such as the fast path of ``nn.MultiheadAttention`` and
      ``nn.TransformerEncoderLayer`` in eval mode
      (``torch.backends.mha.set_fastpath_enabled(False)`` turns that off).

    If a backward pass recomputes checkpoints, put it into the block too.

    ``torch.compile`` compiles a function for tilewise while a switch is on in any thread, and for
    torch while none is. It guards on the switch and compiles the other version when needed. A
    compiled call counts whenever it is traced, in the reports of the thread that traces, and not
    when it runs.
    """
    report = _Called()
    _install()
    _HERE.set((*_HERE.get(), report))
    try:
        yield report
    finally:
        # Not by a token: blocks may overlap, and one may end in another context than it began in.
        report.ended = True
        _HERE.set(tuple([each for each in _HERE.get() if each is not report]))
        _uninstall()


def enable() -> Report:
    """Let tilewise compute the calls of all threads, until ``disable``; a second call does nothing.

    Returns:
        The report that goes on counting; the same one from every call until ``disable``.
    """
    with _STATE.lock:
        if _STATE.everywhere:
            return _STATE.everywhere[0]
        _STATE.everywhere = (_Called(),)
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
    with _STATE.lock:
        _STATE.open += 1
        if _STATE.open > 1:
            return
        there = getattr(_PLACE, _NAME)
        places = _STATE.places
        found = [each for each in places if there is each.before or there is each.stand_in]
        place = found[0] if found else _Place(there)
        _STATE.places = [each for each in places if each is not place] + [place]
        place.on = True
        setattr(_PLACE, _NAME, place.stand_in)


def _uninstall() -> None:
    with _STATE.lock:
        _STATE.open -= 1
        if _STATE.open:
            return
        place = _STATE.places[-1]
        place.on = False
        if getattr(_PLACE, _NAME) is place.stand_in:  # else somebody has put theirs over it
            setattr(_PLACE, _NAME, place.before)


def _reports() -> tuple[_Called, ...]:
    return tuple([each for each in _HERE.get() if not each.ended]) + _STATE.everywhere


@constant_while_compiling
def _note_traced(reason: str | None) -> bool:
    """Count, while torch.compile traces, and be nothing of the graph."""
    for report in _reports():
        report.note(reason)
    return True


def _standing_in(place: _Place) -> Callable[..., Tensor]:
    """Return the stand-in for what stood at a place."""

    def stand_in(*args: Any, **keywords: Any) -> Tensor:
        compiling = torch.compiler.is_compiling()
        reports = () if compiling or not place.on else _reports()
        if not (reports or (compiling and place.on)):
            return place.before(*args, **keywords)
        reason, out = take(args, keywords)
        if compiling:
            _note_traced(reason)
        for report in reports:
            report.note(reason)
        return place.before(*args, **keywords) if out is None else out

    stand_in.__name__ = stand_in.__qualname__ = _NAME
    stand_in.__doc__ = TORCH.__doc__
    return stand_in
