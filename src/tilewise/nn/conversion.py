"""``convert``: the attention modules of a model, replaced where they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from tilewise.errors import InvalidType
from tilewise.nn.attention import Attention
from tilewise.nn.multihead import MultiheadAttention
from tilewise.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

# Of each of torch's classes, the one that takes its place. Every one of ours is a subclass of
# torch's with the same state and another forward: a module of torch's becomes ours by its class.
_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
}
_KNOWN: tuple[type[nn.Module], ...] = (Attention, *_OURS.values())
_SHOWN = 4  # names of a line


class Place(NamedTuple):
    """A module of a model.

    Args:
        name: as ``named_modules`` has it; "" is the model itself.
        kind: the name of its class, before.
        why: why it was left; "" for one that was not.
    """

    name: str
    kind: str
    why: str = ""


class Conversion(NamedTuple):
    """What ``convert`` did; ``print`` shows it.

    Args:
        replaced: modules that are now tilewise's.
        already: modules that were before.
        left: modules with attention that stay as they are, and why.
    """

    replaced: tuple[Place, ...]
    already: tuple[Place, ...]
    left: tuple[Place, ...]

    def __str__(self) -> str:
        if not any(self):
            return "tilewise.nn.convert: no module of attention in this model"
        counts = f"{len(self.replaced)} replaced, {len(self.left)} left as they are"
        if self.already:
            counts += f", {len(self.already)} that were tilewise's already"
        lines = [f"tilewise.nn.convert: {counts}"]
        for word, places in (("replaced", self.replaced), ("left", self.left)):
            alike: dict[tuple[str, str], list[str]] = {}
            for name, kind, why in places:
                alike.setdefault((kind, why), []).append(name or "(the model)")
            for (kind, why), names in alike.items():
                lines.append(f"  {word}: {len(names)} x {kind}: {_listed(names)}")
                lines += [f"    {why}"] if why else []
        return "\n".join(lines)


def convert(model: nn.Module, *, drop_weights: bool = False, quiet: bool = False) -> Conversion:
    """Replace the attention modules of torch in a model, in place, and print what was done.

    ``torch.nn.MultiheadAttention``, ``TransformerEncoderLayer`` and ``TransformerDecoderLayer``
    become the modules of those names of ``tilewise.nn``. Each stays the object that it is: its
    parameters and buffers (optimizers go on), hooks, training flag, dtype and device, and whatever
    else refers to it, the model itself included. To convert again does nothing.

    These modules stay as they are, and are named with the reason:

    * subclasses of those three, which may compute something else;
    * modules whose ``forward`` was replaced on the instance;
    * scripted ones;
    * modules that look like attention but are not torch's.

    Convert before ``torch.jit.script`` and ``fully_shard``, which make other classes of a model's;
    a compiled model is compiled again at its next call.

    Args:
        model: any module.
        drop_weights: of every ``MultiheadAttention``, those that were tilewise's before included,
            let no call compute weights, though it asks for them or leaves ``need_weights`` at its
            default True: such calls get None in their place. For models that throw them away.
        quiet: do not print.

    Returns:
        What was replaced and what was left: not the model.

    Raises:
        InvalidType: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidType("model", f"a {type(model).__name__}", "a torch.nn.Module")
    replaced: list[Place] = []
    already: list[Place] = []
    left: list[Place] = []
    others: list[str] = []  # modules that were left whole: what is within them is not named again
    for name, module in list(model.named_modules()):
        place = Place(name, type(module).__name__)
        ours = _OURS.get(type(module))
        why = _why_left(module)
        if isinstance(module, _KNOWN):
            already.append(place)
        elif why:
            left.append(place._replace(why=why))
            others.append(name)
        elif ours is not None:
            module.__class__ = ours
            replaced.append(place)
        elif not any(_within(name, other) for other in others):
            why = _why_unknown(module)
            if why:
                left.append(place._replace(why=why))
                others.append(name)
        if drop_weights and isinstance(module, MultiheadAttention):
            module.drop_weights = True
    found = Conversion(tuple(replaced), tuple(already), tuple(left))
    if not quiet:
        print(found)
    return found


def _why_left(module: nn.Module) -> str:
    """Return why one of torch's three modules, or a subclass, is left; "" if it is not."""
    kind = next((known for known in _OURS if isinstance(module, known)), None)
    if kind is None or isinstance(module, _KNOWN):
        return ""
    if type(module) is kind:
        if "forward" in vars(module):
            return "its forward was replaced on the instance, and would go on being called"
        return _why_left_layer(module)
    what = f"a subclass of torch.nn.{kind.__name__}, which may compute something else"
    if kind is nn.MultiheadAttention:
        return f"{what}; make it a subclass of tilewise.nn.{kind.__name__}"
    if kind is nn.TransformerEncoderLayer:
        return (
            f"{what}; in eval mode without gradients torch's fast path computes it in one piece, "
            "whatever its self_attn is: torch.backends.mha.set_fastpath_enabled(False)"
        )
    return f"{what}; its own attention modules are looked at one by one"


def _why_left_layer(layer: nn.Module) -> str:
    """An encoder layer reads its self_attn in torch's fast path, and calls it in ours.

    The two are the same for what is tilewise's, or will be, and for nothing else.
    """
    if not isinstance(layer, nn.TransformerEncoderLayer):
        return ""
    inner: nn.Module = layer.self_attn
    if isinstance(inner, MultiheadAttention):
        return ""
    if type(inner) is nn.MultiheadAttention and "forward" not in vars(inner):
        return ""
    return f"its self_attn, a {type(inner).__name__}, is none that can be replaced"


def _why_unknown(module: nn.Module) -> str:
    """Return why a module that seems to have attention is not for ``convert``; "" for any other."""
    if isinstance(module, torch.jit.ScriptModule):
        scripted = module.original_name in {kind.__name__ for kind in _OURS}
        return "it is scripted: convert the model before torch.jit.script" if scripted else ""
    if hasattr(module, "set_attn_implementation"):
        return (
            "a model of transformers: tilewise.integrations.transformers.register(), then "
            'model.set_attn_implementation("tilewise")'
        )
    if "attention" in type(module).__name__.lower():
        return (
            "not a module of torch.nn; where it calls F.scaled_dot_product_attention, "
            "`with tilewise.sdpa():` or tilewise.compat.sdpa.enable() takes the call"
        )
    return ""


def _within(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


def _listed(names: list[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return ", ".join([*names[: _SHOWN - 1], "...", names[-1]])
