"""Take a call of ``F.scaled_dot_product_attention``, or give the reason why tilewise does not.

The replacements of torch's function use this module: ``sdpa_switch`` for any code that calls the
function, ``tilewise.integrations.timm`` for the layers of a model.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.compat.sdpa_call import Call, attend, cast
from tilewise.compat.sdpa_mistakes import mistake, why_not
from tilewise.errors import TilewiseError, Unsupported
from tilewise.torch_private import FakeTensor
from tilewise.variants.values import Score

_PLAIN = frozenset((Tensor, Parameter, FakeTensor))
_WIDEST = 512  # of every backend; torch.compile cannot ask them before the call runs


class Report:
    """Record of the calls that a switch saw.

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
        """Return all of them."""
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


def take(
    args: tuple[Any, ...], keywords: dict[str, Any], more: tuple[Score, ...] = ()
) -> tuple[str | None, Tensor | None]:
    """The output of a call, or the reason why tilewise does not compute it; one of them is None.

    Scores in ``more`` apply after what the call says.
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
        call = cast(call)
    except (TypeError, AttributeError):
        return "what torch refuses (types)", None
    reason = _against(call)
    if reason is not None:
        return reason, None
    try:
        return None, attend(call, more)
    except Unsupported as error:  # raised before anything is computed
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
