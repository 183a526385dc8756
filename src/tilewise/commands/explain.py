"""``tilewise explain``: the plan for a problem that is given by its shape, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tilewise.chips import CHIPS, named
from tilewise.commands.plugins import plugin
from tilewise.commands.shape import DTYPES, MASK_FORMS, read, room
from tilewise.errors import InvalidArgument
from tilewise.inspect.answer import Answer, Question, answer
from tilewise.plan.traffic.account import trains
from tilewise.plan.traffic.memory import fit
from tilewise.plan.traffic.report import amount
from tilewise.problem import Problem


def main(argv: Sequence[str] | None = None) -> int:
    """Print how a call of this shape would be done, what it moves, and why nothing else does it."""
    options = _parser().parse_args(argv)
    chip = None if options.chip is None else named(options.chip)
    question = read(options, chip)
    space = room(options.fit) if options.fit else None
    found = answer(question, chip, options.dropout, options.backend)
    for name, text in question.notes:
        print(f"{name:9} {text}")
    print(found.text)
    if space is not None and found.problem is not None:
        for line in _fitting(found.problem, space, question.layers):
            print(line)
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
    add("--html", type=Path, metavar="FILE", help="write a page with a roofline and bars")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mask", help=MASK_FORMS)
    which.add_argument("--causal", action="store_true", help="the same as --mask causal")
    which.add_argument("--window", type=int, metavar="W", help="W keys to either side")
    return parser
