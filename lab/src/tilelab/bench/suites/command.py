"""``tilewise bench SUITE ...``, ``bench show FILE.json``, ``bench compare A.json B.json``.

Exit status: 0 done, 1 ours is wrong or something failed, 2 wrong usage, 130 stopped with
Ctrl-C (what was done by then is written).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from tilelab.bench.suites import accuracy, compare, memory, models, paper, speed, variants
from tilelab.bench.suites.page import html, markdown, pictures
from tilelab.bench.suites.points import Record
from tilelab.bench.suites.sentences import sentences
from tilelab.bench.suites.steps import (
    LENGTHS,
    QUICK_LENGTHS,
    Budget,
    Settings,
    Step,
    conduct,
)
from tilelab.bench.suites.tables import heading, tables
from tilelab.common.tables import show_tables
from tilelab.common.terminal import interrupts_ignored, positive
from tilelab.peers.methods import OURS
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.inspect.known_models import KNOWN_MODELS, known_model
from tilewise.inspect.peaks import absence

SUITES: dict[str, Callable[[Settings], list[Step]]] = {
    "speed": speed.steps,
    "memory": memory.steps,
    "accuracy": accuracy.steps,
    "paper": paper.steps,
    "models": models.steps,
    "variants": variants.steps,
}
_DTYPES = ("float32", "bfloat16", "float16")


def suites_main(argv: Sequence[str]) -> int:
    """Run suites.

    Raises:
        InvalidArgument: there is no such device or model.
        Unsupported: there is no compiled core to measure.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    unknown = [name for name in options.suites if name not in (*SUITES, "all")]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join((*SUITES, 'all'))}")
    settings = _settings(options)
    if settings.device == "cpu" and absence():
        raise Unsupported("the bench measures the compiled core", {"cpu": [absence() or ""]})
    names = list(SUITES) if "all" in options.suites else list(dict.fromkeys(options.suites))
    rounds = (options.rounds, options.rounds) if options.rounds else (3, 15)
    chosen = {
        "lengths": list(settings.lengths),
        "dtypes": list(settings.dtypes),
        "minutes": options.minutes,
        "quick": options.quick,
    }
    record = Record.begin(names, settings.device, chosen)
    path = options.out / f"{'all' if len(names) == len(SUITES) else '-'.join(names)}.json"
    suites = [(name, SUITES[name](settings)) for name in names]
    budget = Budget(options.minutes, rounds, 0.5 if options.quick else 2.0)
    code = conduct(record, suites, budget, path, Console(stderr=True))
    with interrupts_ignored():
        record.write(path)
        pages = _write_pages(record, path)
        _show(record, as_markdown=options.markdown)
        print(f"\nWritten: {path}, {', '.join(str(page) for page in pages)}", file=sys.stderr)
    return code or _status(record)


def _show(record: Record, *, as_markdown: bool) -> None:
    if as_markdown:
        print(markdown(record))
        return
    print("\n".join(heading(record)))
    for suite in record.suites:
        show_tables(["", suite, *sentences(record, suite)], tables(record, suite), False)


def _write_pages(record: Record, path: Path) -> list[Path]:
    made = {path.with_suffix(".html"): html(record), path.with_suffix(".md"): markdown(record)}
    for page, text in made.items():
        page.write_text(text, encoding="utf-8")
    return list(made)


def _status(record: Record) -> int:
    """1 where ours is wrong or failed."""
    bad = any(p.status in ("wrong", "failed") and p.method == OURS for p in record.points)
    return int(bad)


def _settings(options: argparse.Namespace) -> Settings:
    if options.device == "cuda" and not torch.cuda.is_available():
        came = f"cuda, and torch {torch.__version__} finds no GPU that it can use"
        raise InvalidArgument("--device", came, "a device that is there", "`--device cpu` is.")
    cuda = options.device == "cuda" or (options.device is None and torch.cuda.is_available())
    models = tuple(options.models or KNOWN_MODELS)
    for name in models:
        known_model(name)
    usual = ("bfloat16",) if cuda else ("float32", "bfloat16")
    return Settings(
        "cuda" if cuda else "cpu",
        tuple(sorted(set(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)))),
        options.quick,
        tuple(options.dtype or (usual[:1] if options.quick else usual)),
        not (options.no_flex or options.quick),
        models,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise bench",
        description="Measure suites. Correctness first: a time of an exact method whose output "
        "fails the 2x rule is not reported, and approximate methods print their error.",
        epilog="`tilewise bench compare A.json B.json` shows what moved between two runs; "
        "`tilewise bench cpu` measures the cases that have goals, for benchmarks/<chip>/cpu.json.",
    )
    add = parser.add_argument
    add("suites", nargs="+", metavar="SUITE", help=f"{', '.join(SUITES)}, or all")
    add("--minutes", type=_minutes, default=10.0, help="time budget (10)")
    add("--quick", action="store_true", help="few lengths and cases, one dtype")
    add("--lengths", type=_whole_numbers, metavar="N,N", help="of the sweep (128 to 65536)")
    add("--dtype", action="append", choices=_DTYPES, help="only this dtype (repeat for more)")
    add("--rounds", type=positive, metavar="N", help="rounds of every step (3 to 15)")
    add("--device", choices=("cpu", "cuda"), help="a GPU where there is one")
    add("--models", type=_names, metavar="NAME,NAME", help="only these, in the suite models")
    add("--no-flex", action="store_true", help="without FlexAttention, which compiles")
    add("--out", type=Path, default=Path("bench-results"), metavar="FOLDER", help="for the files")
    add("--markdown", action="store_true", help="print Markdown")
    return parser


def show_main(argv: Sequence[str]) -> int:
    """Print a stored run, and write its page and its Markdown again.

    Raises:
        InvalidArgument: it is no record of a suite.
    """
    parser = argparse.ArgumentParser(
        prog="tilewise bench show", description="Print a stored run and write its page again."
    )
    parser.add_argument("source", type=Path, metavar="FILE.json")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="write every figure of the page as an SVG"
    )
    options = parser.parse_args(argv)
    record = Record.read(options.source)
    _show(record, as_markdown=options.markdown)
    _write_pages(record, options.source)
    if options.figures is not None:
        options.figures.mkdir(parents=True, exist_ok=True)
        for name, drawing in pictures(record).items():
            (options.figures / f"{name}.svg").write_text(drawing, encoding="utf-8")
    return _status(record)


def compare_main(argv: Sequence[str]) -> int:
    """Compare two records; with ``--check`` 1 where ours got slower by more than the noise."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench compare",
        description="Ratios of two runs, and what moved by more than the noise of their rounds.",
    )
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument("--all", action="store_true", help="also what did not move")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--check", action="store_true", help="fail if tilewise got slower")
    options = parser.parse_args(argv)
    before, after = compare.read(options.before, "A.json"), compare.read(options.after, "B.json")
    table = compare.table(before, after, every=options.all)
    show_tables([f"{options.before} -> {options.after}"], [table], options.markdown)
    slower = [
        each
        for each in compare.compare(before, after)
        if each.word == "slower" and each.point.method == OURS
    ]
    return int(options.check and bool(slower))


def _names(text: str) -> list[str]:
    return text.split(",")


def _whole_numbers(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return value
