"""The problem that the command line names: shape, model, mask, dtype."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

import torch

from tilewise.chips import Chip
from tilewise.errors import InvalidArgument
from tilewise.inspect.answer import Question
from tilewise.inspect.known_models import KnownModel, known_model
from tilewise.variants import masks, scores

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
    "float8": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The values of ``--mask``: forms without a number, and names that take one after a colon.
_PLAIN_MASKS: Mapping[str, Callable[[], masks.Mask | None]] = {
    "none": lambda: None,
    "full": lambda: None,
    "causal": masks.causal,
}
_SIZED_MASKS: Mapping[str, Callable[[int], masks.Mask]] = {
    "window": lambda size: masks.window(size, size),
    "causal+window": lambda size: masks.window(size, 0),
    "sliding": lambda size: masks.window(size, 0),  # as causal+window
    "prefix": masks.prefix,
}
MASK_FORMS = ", ".join([*_PLAIN_MASKS, *(f"{name}:N" for name in _SIZED_MASKS)])


def read(options: argparse.Namespace, chip: Chip | None) -> Question:
    """Return what the options of the command ask for."""
    model = known_model(options.model) if options.model else None
    batch, heads, queries, head_dim = _shape(options, model)
    kv_heads = options.kv_heads or (model.kv_heads if model else heads)
    keys = options.keys or queries
    mask = _mask(options, model)
    cap = options.softcap or (model.softcap if model else None)
    dtype, notes = _dtype(options, model, chip)
    if model is not None:
        notes = (
            ("model", f"{options.model.lower()}, {model.layers} layers: {model.source}"),
            *_window_note(model),
            *notes,
        )
    return Question(
        (batch, heads, queries, head_dim),
        (batch, kv_heads, keys, head_dim),
        options.value_dim or head_dim,
        DTYPES[dtype],
        mask,
        scores.softcap(cap) if cap else None,
        model.layers if model else 1,
        notes,
    )


def _dtype(
    options: argparse.Namespace, model: KnownModel | None, chip: Chip | None
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the name of the dtype, and a note if the user did not name it."""
    if options.dtype is not None:
        return options.dtype, ()
    found, why = "float32", "on a processor"
    if model is not None:
        found, why = model.dtype, "as the model is usually run"
    if chip is not None and chip.kind == "gpu" and found == "float32":
        found, why = "bfloat16", "on a GPU"
    if found == "bfloat16" and chip is not None and chip.peak(found) is None:
        found, why = "float16", f"{chip.name} multiplies no bfloat16"
    return found, (("dtype", f"{found}: {why} (--dtype for another)"),)


def _window_note(model: KnownModel) -> tuple[tuple[str, str], ...]:
    if not 0 < model.windowed < model.layers:
        return ()
    text = f"{model.windowed} of the layers see {model.window} keys back; this is of the others"
    return (("layers", f"{text} (--mask causal+window:{model.window} for those)"),)


def _shape(options: argparse.Namespace, model: KnownModel | None) -> tuple[int, int, int, int]:
    given = [bool(options.sizes), options.shape is not None, model is not None]
    if sum(given) != 1:
        ways = "four sizes B HQ M D, --shape BxHQxMxD or --model NAME"
        came = "no sizes" if not any(given) else "more than one of them"
        raise InvalidArgument("shape", came, f"one of {ways}")
    if model is not None:
        return options.batch or 1, model.heads, options.queries or model.length, model.head_dim
    text = options.shape if options.shape is not None else " ".join(options.sizes)
    sizes = re.split("[x, ]", text.lower())
    if len(sizes) != 4 or not all(size.isdigit() for size in sizes):
        raise InvalidArgument("shape", repr(text), "four sizes, e.g. 1x32x8192x128 (BxHQxMxD)")
    batch, heads, queries, head_dim = (int(size) for size in sizes)
    return options.batch or batch, heads, options.queries or queries, head_dim


def _mask(options: argparse.Namespace, model: KnownModel | None) -> masks.Mask | None:
    if options.window is not None:
        return masks.window(options.window, options.window)
    if options.causal:
        return masks.causal()
    if options.mask is not None:
        return _named_mask(options.mask)
    if model is None or not model.causal:
        return None
    if model.window is not None and model.windowed == model.layers:
        return masks.window(model.window, 0)
    return masks.causal()


def _named_mask(text: str) -> masks.Mask | None:
    name, colon, number = text.lower().partition(":")
    if not colon and name in _PLAIN_MASKS:
        return _PLAIN_MASKS[name]()
    if name in _SIZED_MASKS and number.isdigit():
        return _SIZED_MASKS[name](int(number))
    fix = f"Give a number of keys: {name}:256." if name in _SIZED_MASKS else ""
    raise InvalidArgument("mask", repr(text), f"one of {MASK_FORMS}", fix)


def room(text: str) -> int:
    """Return bytes of "24GB" (decimal), "24GiB" (binary) or "24G"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if found is None or (found[3] and not found[2]):
        raise InvalidArgument("fit", repr(text), "a memory, e.g. 24GB or 16GiB")
    unit = (_BINARY if found[3] else _UNITS)[found[2]]
    return int(float(found[1]) * unit)
