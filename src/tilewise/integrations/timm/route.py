"""Route a timm layer's one call of torch's function to ``tilewise.attention``, and count the calls.

A switched layer has a class derived from its own, with a different forward. During that forward,
torch's hook for overriding functions sees every function of torch that the layer calls, and
replaces one. The hook is a ``TorchFunctionMode`` of this thread alone.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tilewise.choice import Report as Calls
from tilewise.compat.sdpa import take
from tilewise.compat.sdpa_call import TORCH
from tilewise.torch_private import constant_while_compiling
from tilewise.variants import scores
from tilewise.variants.values import Score

_NUMBERS = count()
_ALL: WeakValueDictionary[int, Report] = WeakValueDictionary()


class Report(Calls):
    """Counts of the calls that tilewise took or left to torch, why, and of which layers.

    Args:
        taken: how many calls tilewise computed.
        left: how many calls torch computed, by the reason why tilewise did not.
        layers: how many layers were switched, by their class.
        passed_over: how many compute attention weights themselves and stay as they are, by class.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: Counter[str] = Counter()
        self.passed_over: Counter[str] = Counter()
        self.number = next(_NUMBERS)
        _ALL[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        """Itself: the calls of a copied model count where those of the model do."""
        return self

    def __reduce__(self) -> tuple[type[Report], tuple[()], dict[str, Any]]:
        """Pickle the layers, and no calls yet."""
        return Report, (), {"layers": self.layers, "passed_over": self.passed_over}

    def __str__(self) -> str:
        lines = [super().__str__(), f"  layers: {_listed(self.layers) or 'none'}"]
        if self.passed_over:
            lines.append(f"  compute weights themselves: {_listed(self.passed_over)}")
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {number}" for name, number in counts.items())


@constant_while_compiling
def note_traced(number: int, reason: str | None) -> bool:
    """Count, while torch.compile traces, and be nothing of the graph: a report by its number."""
    report = _ALL.get(number)
    if report is not None:
        report.note(reason)
    return True


_WINDOWS = "timm.models.swin_transformer.WindowAttention"
_HIDDEN = -100.0
_MADE: dict[type[nn.Module], type[nn.Module]] = {}
_ELSEWHERE = "another function in the name of F.scaled_dot_product_attention, which computed it"


class _Route(TorchFunctionMode):
    """Torch's functions, but for one.

    Args:
        report: where calls are counted.
        shift: [windows, N, N], added to the scores of batch item b by its row b % windows; see
            ``_shifted``.
    """

    def __init__(self, report: Report, shift: Tensor | None = None) -> None:
        super().__init__()
        self.report, self.shift = report, shift

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func is not TORCH:
            return func(*args, **keywords)
        more = () if self.shift is None else (_shifted(self.shift),)
        reason, out = take(args, keywords, more)
        _note(self.report, reason)
        if out is not None:
            return out
        if self.shift is not None:
            whole = keywords["attn_mask"] + _spread(self.shift, args[0])
            keywords = {**keywords, "attn_mask": whole}
        return func(*args, **keywords)


class Routed(nn.Module):
    """Base that a class made by ``routed_class`` has in front of the layer's own."""

    _tilewise_report: Report
    _tilewise_was_fused: bool

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Run the layer's own forward, with tilewise where it calls torch's function."""
        if functional.scaled_dot_product_attention is not TORCH:
            _note(self._tilewise_report, _ELSEWHERE)
            return super().forward(*args, **keywords)
        with _Route(self._tilewise_report):
            return super().forward(*args, **keywords)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle by the name of the layer's own class."""
        found: Any = super().__reduce_ex__(protocol)
        return (_remade, (unrouted_class(type(self)),), *found[2:])


class _RoutedWindows(Routed):
    """Swin's windows: the mask of the shifted ones goes beside the bias, and not into it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """As ``Routed``; mask: [windows, N, N], or None."""
        if mask is None or functional.scaled_dot_product_attention is not TORCH:
            return super().forward(x, mask)
        with _Route(self._tilewise_report, mask):
            return super(Routed, self).forward(x)


def routed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a layer has while it is switched on; the same one every time."""
    made = _MADE.get(kind)
    if made is None:
        windows = any(f"{each.__module__}.{each.__qualname__}" == _WINDOWS for each in kind.__mro__)
        known = list(inspect.signature(kind.forward).parameters) == ["self", "x", "mask"]
        front = _RoutedWindows if windows and known else Routed
        made = _MADE[kind] = type(f"Tilewise{kind.__name__}", (front, kind), {})
    return made


def unrouted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that ``routed_class`` was given."""
    found: type[nn.Module] = kind.__bases__[1]
    return found


def _remade(kind: type[nn.Module]) -> nn.Module:
    made = routed_class(kind)
    return made.__new__(made)


def _note(report: Report, reason: str | None) -> None:
    if torch.compiler.is_compiling():
        note_traced(report.number, reason)
    else:
        report.note(reason)


def _shifted(shift: Tensor) -> Score:
    """Return the score that adds ``shift`` to window b and hides pairs where it is -100 or less.

    timm's page says 0 or -inf, and its code -100. Weights of e^-100 are no normal numbers of
    float32, and processors take some fifteen times as long for products of those.
    """
    windows = shift.shape[0]

    def added(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        here = shift[b % windows, m, n]
        return s + torch.where(here > _HIDDEN, here, -math.inf)

    return scores.function(added)


def _spread(shift: Tensor, query: Tensor) -> Tensor:
    """[B, 1, N, N]: what timm adds to the bias of every batch item."""
    return shift.repeat(query.shape[0] // shift.shape[0], 1, 1)[:, None]
