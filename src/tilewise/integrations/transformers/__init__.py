"""``attn_implementation="tilewise"`` for the models of transformers, through its own interfaces.

Three lines::

    import tilewise.integrations.transformers
    tilewise.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tilewise")

transformers asks two functions of an implementation: one makes masks (``masks.py``), the other
computes attention with them (``forward.py``). ``attn_implementation="tilewise_paged"`` attends over
paged caches, for ``tilewise.serving.generate`` (``decoding.py``). ``absorb(model)`` lets a model
with latent attention decode in its absorbed form (``latent.py``). Importing this registers nothing,
and no module of transformers is changed.
"""

from __future__ import annotations

import inspect
from typing import Any

from tilewise.errors import Unsupported
from tilewise.integrations.transformers.decoding import paged_caches, paged_forward, paged_step
from tilewise.integrations.transformers.forward import attention_forward
from tilewise.integrations.transformers.indexers import tile_indexers, untile_indexers
from tilewise.integrations.transformers.latent import (
    NAME,
    PAGED_NAME,
    absorb,
    latent_cache,
    unabsorb,
)
from tilewise.integrations.transformers.masks import Pairs, make_mask, mask_of_model

__all__ = [
    "NAME",
    "PAGED_NAME",
    "Pairs",
    "absorb",
    "attention_forward",
    "latent_cache",
    "make_mask",
    "mask_of_model",
    "paged_caches",
    "paged_forward",
    "paged_step",
    "register",
    "tile_indexers",
    "unabsorb",
    "unregister",
    "untile_indexers",
]

_FIX = "pip install 'transformers>=5'; version 5.23 is tested"


def register() -> None:
    """Make transformers know ``"tilewise"`` and ``"tilewise_paged"``. Twice is the same as once.

    Raises:
        Unsupported: transformers is absent, or of before its mask functions were told offsets; or
            something else is registered under this name.
    """
    for interface, name, function in _interfaces():
        held = interface._global_mapping.get(name)
        if held is not None and held is not function:
            raise Unsupported(
                f"{interface.__name__} of transformers has another function named {name!r}: {held}",
                fix=f"remove it: {interface.__name__}._global_mapping.pop({name!r})",
            )
    for interface, name, function in _interfaces():
        interface.register(name, function)


def unregister() -> None:
    """Undo ``register``; models that were made with either then fail by its name.

    Raises:
        Unsupported: as ``register``.
    """
    for interface, name, function in _interfaces():
        if interface._global_mapping.get(name) is function:
            del interface._global_mapping[name]


def _interfaces() -> tuple[tuple[Any, str, Any], ...]:
    """Return the interfaces of transformers, each with a name and the function for it."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
        from transformers.masking_utils import eager_mask
    except ImportError as error:
        what = f"tilewise.integrations.transformers without transformers 5: {error}"
        raise Unsupported(what, fix=_FIX) from error
    if "q_offset" not in inspect.signature(eager_mask).parameters:
        what = f"transformers {__version__}, whose mask functions are not told q_offset"
        raise Unsupported(what, fix=_FIX)
    return (
        (AttentionInterface, NAME, attention_forward),
        (AttentionMaskInterface, NAME, mask_of_model),
        (AttentionInterface, PAGED_NAME, paged_forward),  # without a function there are no masks
    )
