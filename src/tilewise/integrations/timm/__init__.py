"""A switch for the models of timm: ``enable(model)``, and its attention is tilewise's.

    import tilewise.integrations.timm
    report = tilewise.integrations.timm.enable(model)
    model(images)
    print(report)  # how many calls were taken, of which layers, and what was left and why

timm has no list of attention implementations to register in. All but a few of its layers call
``F.scaled_dot_product_attention`` when their ``fused_attn`` is set. So the switch belongs to a
model. Importing this module does not import timm, and never patches any of it.

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

from tilewise.compat.sdpa import take
from tilewise.compat.sdpa_call import TORCH
from tilewise.errors import InvalidType, Unsupported
from tilewise.preference import Report as Calls
from tilewise.torch_private import constant_while_compiling
from tilewise.variants import scores
from tilewise.variants.values import Score

__all__ = ["Report", "disable", "enable"]

_WINDOWS = "timm.models.swin_transformer.WindowAttention"
_HIDDEN = -100.0
_ELSEWHERE = "another function in the name of F.scaled_dot_product_attention, which computed it"
_NUMBERS = count()
_ALL: WeakValueDictionary[int, Report] = WeakValueDictionary()
_MADE: dict[type[nn.Module], type[nn.Module]] = {}


def enable(model: nn.Module) -> Report:
    """Let tilewise compute the attention of a model's layers, until ``disable``.

    Every layer of timm that can call ``F.scaled_dot_product_attention`` does so from now on. Its
    ``fused_attn`` becomes True; timm leaves it off for Swin and some others. While the layer is in
    its forward, that function is ``tilewise.attention``. Calls that tilewise does not cover go to
    torch, and are counted. Parameters, buffers and the state dict stay what they are; copies and
    pickles of the model stay switched.

    In the windows of Swin, the relative position bias is a captured tensor [H, N, N] with its
    gradient. The mask of shifted windows [windows, N, N] is read in place. Nothing is expanded over
    the batch.

    If another function has replaced torch's (``tilewise.sdpa()`` does so), layers call that one.
    Under ``torch.compile`` a call counts when it is traced. Call ``disable`` before
    ``torch.jit.script``.

    Args:
        model: of timm, or with modules of timm in it. Once more is the same.

    Returns:
        The report that goes on counting; the one that there is where the model is switched already.

    Raises:
        InvalidType: model is no module.
        Unsupported: it has no layer of timm that can call the function; named are those that
            compute attention weights themselves.
    """
    found = _layers(model)
    able = [layer for layer in found if _is_able(layer)]
    if not able:
        raise _refused(model, found)
    report = next((layer._tilewise_report for layer in able if _is_on(layer)), None) or Report()
    for layer in able:
        if _is_on(layer):
            continue
        report.layers[type(layer).__name__] += 1
        layer._tilewise_report, layer._tilewise_was_fused = report, layer.fused_attn
        layer.__class__, layer.fused_attn = _routed_class(type(layer)), True
    report.passed_over = Counter(type(each).__name__ for each in found if not _is_able(each))
    return report


def disable(model: nn.Module) -> Report:
    """Undo ``enable``: the layers are of timm's classes again, with the ``fused_attn`` they had.

    Returns:
        The report of the calls since ``enable``; an empty one where the model was not switched.

    Raises:
        InvalidType: model is no module.
    """
    report = None
    for layer in _layers(model):
        if not _is_on(layer):
            continue
        report = layer._tilewise_report
        layer.__class__, layer.fused_attn = _unrouted_class(type(layer)), layer._tilewise_was_fused
        del layer._tilewise_report, layer._tilewise_was_fused
    return report or Report()


def _layers(model: nn.Module) -> list[Any]:
    """The layers of attention in a model that are timm's, or of classes derived from timm's."""
    if not isinstance(model, nn.Module):
        raise InvalidType("model", f"a {type(model).__name__}", "a torch.nn.Module")
    return [each for each in model.modules() if _of_timm(type(each)) and _is_attention(each)]


def _of_timm(kind: type) -> bool:
    return any(each.__module__.partition(".")[0] == "timm" for each in kind.__mro__)


def _is_attention(layer: nn.Module) -> bool:
    return _is_able(layer) or (
        type(layer).__name__.endswith(("Attention", "Attn"))
        and not any(_is_able(each) for each in layer.modules())
    )


def _is_able(layer: nn.Module) -> bool:
    """Return whether a layer has a path through ``F.scaled_dot_product_attention``."""
    return isinstance(getattr(layer, "fused_attn", None), bool)


def _is_on(layer: nn.Module) -> bool:
    return isinstance(layer, _Routed)


def _refused(model: nn.Module, found: list[nn.Module]) -> Unsupported:
    """That a model has nothing to switch, and what it has."""
    others = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in found)
    has = ", ".join(f"{name} x {count}" for name, count in others.items())
    what = f"{type(model).__name__}, which has no layer of timm with a fused_attn"
    if has:
        return Unsupported(
            f"{what}: {has} compute attention weights themselves",
            fix="there is nothing to switch: the model runs as timm has it",
        )
    fix = "hand over the model that timm made; for others: with tilewise.sdpa(): model(...)"
    return Unsupported(what, fix=fix)


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
def _note_traced(number: int, reason: str | None) -> bool:
    """Count, while torch.compile traces, and be nothing of the graph: a report by its number."""
    report = _ALL.get(number)
    if report is not None:
        report.note(reason)
    return True


class _Route(TorchFunctionMode):
    """Torch's functions, but for one.

    ``shift``, [windows, N, N], is added to the scores of batch item b by its row b % windows; see
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


class _Routed(nn.Module):
    """Base that a class made by ``_routed_class`` has in front of the layer's own."""

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
        return (_remade, (_unrouted_class(type(self)),), *found[2:])


class _RoutedWindows(_Routed):
    """Swin's windows: the mask of the shifted ones goes beside the bias, and not into it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """As ``_Routed``; mask: [windows, N, N], or None."""
        if mask is None or functional.scaled_dot_product_attention is not TORCH:
            return super().forward(x, mask)
        with _Route(self._tilewise_report, mask):
            return super(_Routed, self).forward(x)


def _routed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a layer has while it is switched on; the same one every time."""
    made = _MADE.get(kind)
    if made is None:
        windows = any(f"{each.__module__}.{each.__qualname__}" == _WINDOWS for each in kind.__mro__)
        known = list(inspect.signature(kind.forward).parameters) == ["self", "x", "mask"]
        front = _RoutedWindows if windows and known else _Routed
        made = _MADE[kind] = type(f"Tilewise{kind.__name__}", (front, kind), {})
    return made


def _unrouted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that ``_routed_class`` was given."""
    found: type[nn.Module] = kind.__bases__[1]
    return found


def _remade(kind: type[nn.Module]) -> nn.Module:
    made = _routed_class(kind)
    return made.__new__(made)


def _note(report: Report, reason: str | None) -> None:
    if torch.compiler.is_compiling():
        _note_traced(report.number, reason)
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
