"""The choice of an indexer, a tile of scores at a time: no queries x keys tensor is written.

An indexer scores all keys for each query, and chooses the best. ``tile_indexers`` lets its code run
on objects that stand for the scores (``unwritten.py``). What comes before, such as norms and
rotations, is the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from tilewise.errors import Unsupported
from tilewise.integrations.transformers.compressed import (
    CHOSEN,
    COMPRESSED,
    choose_entries,
    compress_heavily,
    compress_sparsely,
)
from tilewise.integrations.transformers.masks import by_tiles
from tilewise.integrations.transformers.pools import (
    choose_tokens,
    mask_of_choice,
    visible_tokens,
)
from tilewise.integrations.transformers.unwritten import choose_blocks, choose_keys


class _Form(NamedTuple):
    """A form of indexers, or of modules beside them."""

    parts: tuple[str, ...]  # the attributes that tell it from others
    # What stands in for methods of a module, which comes first.
    methods: dict[str, Callable[..., Any]]
    notes: tuple[str, ...] = ()  # attributes that these may leave behind


def tile_indexers(model: nn.Module) -> None:
    """Let the indexers of a model choose tile by tile, until ``untile_indexers``. Twice is as once.

    A call then holds no queries x keys tensor. The choice is that of the model but for keys whose
    scores differ by rounding: of equal scores it takes the lowest key.

    Args:
        model: of transformers, with ``attn_implementation="tilewise"`` and indexers as those of
            DeepSeek-V3.2, DeepSeek-V4, MiniMax-M3, GLM-5.3 or Qwen4.

    Raises:
        Unsupported: it has no such indexer; or, in a later call, it is compiled, does something
            else with its scores, or gets a mask that adds numbers.
    """
    for module, form in _found(model):
        for name, function in form.methods.items():
            setattr(module, name, partial(function, module))
    _mark(model, True)


def untile_indexers(model: nn.Module) -> None:
    """Undo ``tile_indexers``.

    Raises:
        Unsupported: the model has no such indexer.
    """
    for module, form in _found(model):
        for name in (*form.methods, *form.notes):
            vars(module).pop(name, None)
    _mark(model, False)


def _mark(model: nn.Module, switch: bool) -> None:
    """Note it for the masks, which are made with the model's config.

    An indexer's own may be a copy of it, as in dots3.note.
    """
    for module in model.modules():
        if hasattr(module, "config"):
            by_tiles(module.config, switch)


def _found(model: nn.Module) -> list[tuple[nn.Module, _Form]]:
    found = []
    for module in model.modules():
        forms = (form for form in _FORMS if all(hasattr(module, each) for each in form.parts))
        found += [(module, form) for form in forms][:1]
    if not found:
        what = f"{type(model).__name__}, which has no indexer of a form that is known"
        fix = "hand over a model such as DeepseekV32ForCausalLM of transformers 5.23"
        raise Unsupported(what, fix=fix)
    return found


_FORMS = (
    _Form(("scorer", "index_topk", "compress_rate"), {"forward": choose_entries}, (CHOSEN,)),
    _Form(
        ("indexer", "position_bias", "compress_rate"),
        {"forward": compress_sparsely},
        (COMPRESSED,),
    ),
    _Form(("position_bias", "compress_rate"), {"forward": compress_heavily}, (COMPRESSED,)),
    _Form(("index_qk_proj", "block_topk", "compress_ratio"), {"forward": choose_tokens}),
    _Form(
        ("wq_b", "wk", "weights_proj", "index_kpool"),
        {"forward": choose_keys, "get_visible_tokens": visible_tokens},
    ),
    _Form(("build_attention_mask_from_topk",), {"build_attention_mask_from_topk": mask_of_choice}),
    _Form(("wq_b", "wk", "weights_proj", "index_topk", "config"), {"forward": choose_keys}),
    _Form(("topk_blocks", "block_size", "local_blocks"), {"forward": choose_blocks}),
)
