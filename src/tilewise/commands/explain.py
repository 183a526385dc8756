"""``tilewise explain``: the plan for a problem that is given by its shape, without running it.

The first part reads the problem that the command line names: shape, model, mask, dtype. The second
says what it costs over several processes, for ``--context-parallel``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tilewise.chips import CHIPS, Chip, named
from tilewise.commands import plugin
from tilewise.distributed import LINKS, Forecast, compare
from tilewise.distributed.replay import link_named
from tilewise.errors import InvalidArgument
from tilewise.inspect.answer import Answer, Question, answer
from tilewise.inspect.known_models import KnownModel, known_model
from tilewise.plan.traffic import trains
from tilewise.plan.traffic.memory import fit
from tilewise.plan.traffic.report import amount, duration
from tilewise.problem import Problem
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


def _read(options: argparse.Namespace, chip: Chip | None) -> Question:
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
        ways = "four sizes B HQ M D (1 8 2048 64), --shape 1x8x2048x64 or --model llama-3-8b"
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


_COLUMNS = "{:20} {:>9} {:>9}  {:>18} {:>18}  {:>10}  {:>8}"


def _shared_lines(
    question: Question, chip: Chip | None, ranks: int, link: str, dropout_p: float
) -> Iterator[str]:
    """Yield what every schedule costs, and which one to take.

    ``chip`` is that of every rank, None for this machine; ``link`` is as in ``link_named``.
    """
    chip, found_link = chip or named(), link_named(link)
    shapes = (question.queries, question.keys, (*question.keys[:3], question.value_dim))
    found = compare(
        *(torch.empty(shape, dtype=question.dtype, device="meta") for shape in shapes),
        ranks=ranks,
        layers=question.layers,
        chip=chip,
        link=found_link,
        mask=question.mask,
        score=question.score,
        dropout_p=dropout_p,
    )
    each = f"{amount(found_link.bytes_s, 'B/s')} one way, {duration(found_link.latency_s)}"
    yield f"context   {ranks} ranks of {chip.name}, {found_link.name}: {each}"
    titles = ("schedule", "forward", "backward", "sent", "received", "hidden", "memory")
    yield "          " + _COLUMNS.format(*titles)
    for one in found.forecasts:
        yield "          " + _row(one, question.layers)
    best, *others = found.forecasts
    reason, *against = found.reasons
    yield f"take      {best.name}: {reason}"
    yield f"memory    {_memory(best, question.layers)}"
    for other, why in zip(others, against, strict=True):
        yield f"not {other.name}: {why}"


def _row(found: Forecast, layers: int) -> str:
    """Return the numbers of a schedule: bytes are the most of a rank, forward and backward."""
    passes = found.passes
    return _COLUMNS.format(
        found.name,
        duration(found.forward.seconds),
        "" if found.backward is None else duration(found.backward.seconds),
        ", ".join([amount(max(each.sent)) for each in passes]),
        ", ".join([amount(max(each.received)) for each in passes]),
        ", ".join([f"{each.hidden:.0%}" for each in passes]),
        amount(found.memory.peak(layers)),
    )


def _memory(found: Forecast, layers: int) -> str:
    q, keys, out, *passing = found.memory
    names = ("keys in flight", "sums", "gradients")
    held = [("q", q), ("k and v", keys), ("out and lse", out)]
    times = f" in each of {layers} layers" if layers > 1 else ""
    kept = ", ".join([f"{name} {amount(size)}" for name, size in held])
    work = [f"{name} {amount(size)}" for name, size in zip(names, passing, strict=True) if size]
    return f"{kept}{times}" + (f"; at work {', '.join(work)}" if work else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Print how a call of this shape would be done, what it moves, and why nothing else does it."""
    options = _parser().parse_args(argv)
    if options.context_parallel is None and options.link is not None:
        raise InvalidArgument("--link", options.link, "--context-parallel RANKS beside it")
    if options.context_parallel is not None and options.context_parallel < 1:
        raise InvalidArgument("--context-parallel", str(options.context_parallel), "1 rank or more")
    chip = None if options.chip is None else named(options.chip)
    question = _read(options, chip)
    space = room(options.fit) if options.fit else None
    found = answer(question, chip, options.dropout, options.backend)
    for name, text in question.notes:
        print(f"{name:9} {text}")
    print(found.text)
    if space is not None and found.problem is not None:
        for line in _fitting(found.problem, space, question.layers):
            print(line)
    if options.context_parallel is not None:
        ranks, link = options.context_parallel, options.link or "nvlink"
        print(*_shared_lines(question, chip, ranks, link, options.dropout), sep="\n")
    if options.html is not None:
        _write_page(options.html, question, found)
        print(f"written   {options.html}")
    return 0


def _fitting(problem: Problem, space: int, layers: int) -> list[str]:
    """Return what fits into a memory, plain and ours."""
    of = f"{layers} layers'" if layers > 1 else "one layer's"
    lines = [f"fit       into {amount(space)}, {of} attention alone:"]
    for training, when in ((True, "training"), (False, "inference")):
        if training and not trains(problem):
            continue
        for what in ("batch", "length"):
            found = fit(problem, space, what, layers, training)
            times = f" ({found.tiled / found.plain:.3g} times)" if found.plain else ""
            name = "largest batch" if what == "batch" else "longest sequence"
            text = f"{when}: {name} {found.tiled}, plain {found.plain}{times}"
            lines.append(f"          {text}")
    return lines


def _write_page(path: Path, question: Question, found: Answer) -> None:
    page = plugin("explain-page")
    text = page(question, found)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        came, required = f"{path} ({error.strerror})", "a file in a folder that can be written"
        raise InvalidArgument("--html", came, required) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise explain",
        description="How a problem would be done: backend, tiles, bytes and time against plain "
        "attention, and why no other backend.",
        epilog="In Python, tilewise.explain(q, k, v, ...) explains any call.",
    )
    add = parser.add_argument
    add("sizes", nargs="*", metavar="SIZE", help="the queries: B HQ M D, or BxHQxMxD in one word")
    add("--shape", metavar="BxHQxMxD", help="the same, e.g. 1x32x8192x128")
    add("--model", metavar="NAME", help="the shape of a well-known model, e.g. llama-3-8b")
    add("--batch", type=int, metavar="B", help="instead of the shape's, or of 1")
    add("--queries", type=int, metavar="M", help="instead of the shape's or the model's")
    add("--keys", type=int, metavar="N", help="number of keys (default M)")
    add("--kv-heads", type=int, metavar="HK", help="key/value heads (default HQ or the model's)")
    add("--value-dim", type=int, metavar="DV", help="width of the values (default D)")
    add("--dtype", choices=DTYPES, help="the model's; else float32, on a GPU bfloat16")
    add("--dropout", type=float, default=0.0, metavar="P")
    add("--softcap", type=float, metavar="CAP")
    add("--backend", help="ask for this backend instead of choosing")
    add("--chip", help=f"this (default), {', '.join(CHIPS)}")
    add("--fit", metavar="MEMORY", help="the largest batch and the longest sequence in, e.g., 24GB")
    add("--context-parallel", type=int, metavar="RANKS", help="what each schedule of them costs")
    add("--link", help=f"between ranks: {', '.join(LINKS)}, or GB/s one way (default nvlink)")
    add("--html", type=Path, metavar="FILE", help="write a page with a roofline and bars")
    which = parser.add_mutually_exclusive_group()
    sides = "window: N keys to either side; causal+window, sliding: N before; prefix: the first N"
    which.add_argument("--mask", help=f"{MASK_FORMS} ({sides})")
    which.add_argument("--causal", action="store_true", help="the same as --mask causal")
    which.add_argument("--window", type=int, metavar="W", help="W keys to either side")
    return parser
