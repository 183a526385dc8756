"""A switch for the models of timm: ``enable(model)``, and its attention is tilewise's.

    import tilewise.integrations.timm
    report = tilewise.integrations.timm.enable(model)
    model(images)
    print(report)  # how many calls were taken, of which layers, and what was left and why

timm has no list of attention implementations to register in. All but a few of its layers call
``F.scaled_dot_product_attention`` when their ``fused_attn`` is set. So the switch belongs to a
model. Importing this module does not import timm, and never patches any of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from tilewise.errors import InvalidType, Unsupported
from tilewise.integrations.timm.route import Report, Routed, routed_class, unrouted_class

__all__ = ["Report", "disable", "enable"]


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
        layer.__class__, layer.fused_attn = routed_class(type(layer)), True
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
        layer.__class__, layer.fused_attn = unrouted_class(type(layer)), layer._tilewise_was_fused
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
    return isinstance(layer, Routed)


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
