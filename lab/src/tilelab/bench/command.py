"""``tilewise bench``: measure, print the tables, write the JSON; show a run, compare two.

Exit status: 0 done, 1 ours is wrong, below ``--check``, slower, or something failed, 2 wrong usage,
130 stopped with Ctrl-C (what was done by then is printed and written).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console

from tilelab.bench import children, compare, me, suites
from tilelab.bench.goals import DTYPES, GoalRecord, cases, key_of, measure, overhead
from tilelab.bench.page import html, markdown, pictures
from tilelab.bench.sentences import sentences
from tilelab.bench.steps import LENGTHS, QUICK_LENGTHS, Budget, Settings, Step, SuiteRecord, conduct
from tilelab.bench.tables import heading, suite_heading, suite_tables, tables
from tilelab.cases.case import Case, Pass
from tilelab.common.files import COMPLETE, INTERRUPTED, Finding
from tilelab.common.tables import show_tables
from tilelab.common.terminal import crowded, interrupts_ignored, positive
from tilelab.common.worker import Child, environment
from tilelab.peers.methods import OURS
from tilelab.peers.packages import Package, packages
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.inspect.known_models import KNOWN_MODELS, known_model
from tilewise.inspect.peaks import absence

SUITES: dict[str, Callable[[Settings], list[Step]]] = {
    "speed": suites.speed,
    "memory": suites.memory,
    "accuracy": suites.accuracy,
    "paper": suites.paper,
    "models": suites.models,
    "variants": suites.variants,
    "lists": suites.lists,
    "list-memory": suites.list_memory,
    "widths": suites.widths,
    "doors": suites.doors,
}
_OF_GOALS = ("cpu", "me")  # measured from the cases that have goals
NAMES = (*_OF_GOALS, *SUITES, "all", "compare", "show")
_SCALING_S = 0.6  # for the rounds of one case on one and two threads
_LONG = 16384  # queries and keys of the memory measurement


def run(argv: Sequence[str]) -> int:
    """Run a part of the bench.

    Raises:
        Unsupported: there is no compiled core to measure.
        InvalidArgument: a file is no record of the bench; there is no such device or model.
    """
    first = argv[0] if argv else "cpu"
    if first in SUITES or first == "all":
        return _run_suites(argv)
    if first in ("compare", "show"):
        return (_compare if first == "compare" else _show)(argv[1:])
    if first not in _OF_GOALS and not first.startswith("-"):
        names = f"{', '.join((*_OF_GOALS, *SUITES))}, all"
        near = get_close_matches(first, NAMES, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        print(
            f"tilewise bench: no suite {first!r}.{meant} There are: {names}; "
            "and compare A.json B.json, show FILE.json.",
            file=sys.stderr,
        )
        sys.exit(2)  # as argparse does
    return _run_goals(argv)


def _check_core() -> None:
    missing = absence()
    if missing:
        raise Unsupported("the bench measures the compiled core", {"cpu": [missing]})


def _run_goals(argv: Sequence[str]) -> int:
    """Measure the cases that have goals, or show a stored run of them."""
    parser = _parser_of_goals()
    options = parser.parse_args(argv)
    if options.source is not None:
        record = GoalRecord.read(options.source)
        _show_goals(record, options)
        return _status(record, options.check)
    chosen = [
        case
        for case in cases()
        if case.type_name in (options.dtype or DTYPES)
        and (options.cases or "") in key_of(case)
        and (case.quick or not options.quick)
        and (options.what == "cpu" or key_of(case) in me.EIGHT)
    ]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name for case in cases()))
        wanted = " ".join(filter(None, (options.cases, *(options.dtype or ()))))
        parser.error(f"no case of {options.what} matches {wanted!r}; the cases: {names}")
    _check_core()
    if warning := crowded(options.threads):
        print(f"tilewise bench: {warning}", file=sys.stderr)
    if options.threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        # Torch read the setting when it was loaded: start again with it.
        os.execve(sys.executable, [sys.executable, "-m", "tilelab.bench", *argv], environment())
    others = packages() if options.peers else []
    record = GoalRecord.begin(options.threads, others)
    part = options.what == "me" or options.quick or options.cases or options.dtype
    everything = not (part or options.threads > 1)
    rounds = (options.rounds, options.rounds) if options.rounds else None
    with Child(children.MODULE) as child:
        cores = record.machine["cores"] if everything else 0
        steps = _steps(chosen, options, rounds, child, cores, others)
        unlimited, console = Budget(float("inf")), Console(stderr=True)
        conduct(record, [("cpu", steps)], unlimited, None, console, options.threads)
    # A part of the bench never replaces a whole one.
    path = options.json
    if path is None and everything and rounds is None:
        name = "cpu.json" if record.status == COMPLETE else "cpu-partial.json"
        path = Path("benchmarks", record.machine["slug"], name)
    if path is not None:  # first: a picture may fail
        record.write(path)
    _show_goals(record, options)
    if path is not None:
        print(f"\nAll samples: {path}", file=sys.stderr)
    return 130 if record.status == INTERRUPTED else _status(record, options.check)


def _show_goals(record: GoalRecord, options: argparse.Namespace) -> None:
    """Print the tables of a run; of ``me`` the bars, and draw its picture."""
    if options.what == "cpu":
        show_tables(heading(record), tables(record, brief=options.brief), options.markdown)
        return
    me.show(record, Console())
    try:
        me.draw(record, options.picture)
    except (ValueError, OSError) as error:
        fix = "Name a file such as bench.png in a folder that you can write."
        raise InvalidArgument(
            "--picture", str(options.picture), f"a picture: {error}", fix
        ) from None
    print(f"\nPicture: {options.picture}", file=sys.stderr)


def _steps(
    chosen: Sequence[Case],
    options: argparse.Namespace,
    rounds: tuple[int, int] | None,
    child: Child,
    cores: int,
    others: Sequence[Package],
) -> list[Step]:
    """Return each case, the cost of a call, two threads and memory; the cases alone for 0 cores."""
    short = options.quick or options.what == "me"
    budget_s, usual = (0.8, (3, 9)) if short else (2.0, (3, 15))
    effort = budget_s, rounds or usual

    def one(case: Case, _: Budget) -> list[Finding]:
        return [measure(case, *effort, options.threads, others)]

    steps = [Step(key_of(case), partial(one, case)) for case in chosen]
    if cores or options.quick:
        steps.append(Step("the cost of a call", lambda _: overhead(effort[1][1])))
    if not cores:
        return steps

    def scaling(key: str, _: Budget) -> list[Finding]:
        return [children.scaling(child, key, _SCALING_S)]

    if cores > 1:
        keys = [key_of(case) for case in chosen]
        steps += [Step(f"two threads: {key}", partial(scaling, key)) for key in keys]
    passes: tuple[Pass, ...] = ("forward", "backward")
    for dtype, way in product(("float32", "bfloat16"), passes):
        steps.append(Step(f"memory: {way}, {dtype}", partial(_weigh, dtype, way)))
    return steps


def _weigh(dtype: str, way: Pass, _: Budget) -> Iterator[Finding]:
    return children.memory(_LONG, dtype, way)


def _status(record: GoalRecord, check: float | None) -> int:
    """1 for a wrong case, a failure, or a ratio below the check where ratios are promised."""
    failed = record.status not in (COMPLETE, INTERRUPTED)
    code = 1 if failed or any(result.wrong for result in record.cases) else 0
    if check is None:
        return code
    isa = record.machine["isa"]
    if not isa.startswith("avx512"):
        print(f"The ratios are not checked: they are promised for AVX-512, and {isa} runs here.")
        return code
    judged = [result for result in record.cases if result.goal is not None and not result.wrong]
    below = [result for result in judged if result.ratio < check]
    for result in below:
        print(f"{result.name} {result.dtype}: {result.ratio:.2f}x is below {check:g}x")
    if not below:
        print(f"Every ratio of {len(judged)} is at least {check:g}x.")
    return 1 if below else code


def _parser_of_goals() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise bench",
        description="Measure attention against torch's scaled_dot_product_attention, in turn in "
        "one process, and against the machine's own peak.",
        epilog="The whole bench takes minutes and writes benchmarks/<chip>/cpu.json; a part of it "
        "writes only where --json says. Suites are beside it: tilewise bench speed, memory, "
        "accuracy, paper, models, variants, lists, list-memory, widths, doors or all (each with "
        "--help), tilewise bench show FILE, and tilewise bench compare A.json B.json.",
    )
    add = parser.add_argument
    said = "the cases that have goals (cpu), or eight of them in a minute, with a picture (me)"
    add("what", nargs="?", choices=_OF_GOALS, default="cpu", help=said)
    add("--quick", action="store_true", help="few cases, less than a minute")
    add("--cases", metavar="TEXT", help="only cases whose name and dtype contain this")
    add("--dtype", action="append", choices=DTYPES, help="only this dtype (repeat for more)")
    add("--rounds", type=positive, metavar="N", help="rounds of every case")
    add("--threads", type=positive, default=1, metavar="N", help="more than one: wall time (1)")
    add("--peers", action="store_true", help="also every other package that is installed")
    add("--check", type=float, metavar="R", help="fail if a ratio is below R")
    add("--json", type=Path, metavar="FILE", help="write all samples here")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    said = f"of me ({me.PICTURE}); the ending says the format"
    add("--picture", type=Path, default=me.PICTURE, metavar="FILE", help=said)
    add("--brief", action="store_true", help="print dtypes side by side, without times")
    said = "print the tables of a stored JSON and measure nothing"
    add("--from", dest="source", type=Path, metavar="FILE", help=said)
    return parser


def _run_suites(argv: Sequence[str]) -> int:
    parser = _parser_of_suites()
    options = parser.parse_args(argv)
    unknown = [name for name in options.suites if name not in (*SUITES, "all")]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join((*SUITES, 'all'))}")
    settings = _settings(options)
    if settings.device == "cpu":
        _check_core()
    names = list(SUITES) if "all" in options.suites else list(dict.fromkeys(options.suites))
    rounds = (options.rounds, options.rounds) if options.rounds else (3, 15)
    chosen = {
        "lengths": list(settings.lengths),
        "dtypes": list(settings.dtypes),
        "minutes": options.minutes,
        "quick": options.quick,
    }
    record = SuiteRecord.begin(names, settings.device, chosen)
    path = options.out / f"{'all' if len(names) == len(SUITES) else '-'.join(names)}.json"
    chosen_suites = [(name, SUITES[name](settings)) for name in names]
    budget = Budget(options.minutes, rounds, 0.5 if options.quick else 2.0)
    threads = 1 if settings.device == "cpu" else None
    code = conduct(record, chosen_suites, budget, path, Console(stderr=True), threads)
    with interrupts_ignored():
        record.write(path)
        bad = _print(record, path, options.markdown)
        pages = ", ".join(str(path.with_suffix(end)) for end in (".html", ".md"))
        print(f"\nWritten: {path}, {pages}", file=sys.stderr)
    return code or bad


def _print(record: SuiteRecord, path: Path, as_markdown: bool) -> int:
    """Print a run and write its pages beside its JSON; 1 where ours is wrong or failed."""
    path.with_suffix(".html").write_text(html(record), encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(record), encoding="utf-8")
    if as_markdown:
        print(markdown(record))
    else:
        print("\n".join(suite_heading(record)))
        for suite in record.suites:
            lines = ["", suite, *sentences(record, suite)]
            show_tables(lines, suite_tables(record, suite), False)
    return int(any(p.status in ("wrong", "failed") and p.method == OURS for p in record.points))


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


def _parser_of_suites() -> argparse.ArgumentParser:
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
    add("--dtype", action="append", choices=DTYPES, help="only this dtype (repeat for more)")
    add("--rounds", type=positive, metavar="N", help="rounds of every step (3 to 15)")
    add("--device", choices=("cpu", "cuda"), help="a GPU where there is one")
    add(
        "--models",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help="only these, in the suite models",
    )
    add("--no-flex", action="store_true", help="without FlexAttention, which compiles")
    add("--out", type=Path, default=Path("bench-results"), metavar="FOLDER", help="for the files")
    add("--markdown", action="store_true", help="print Markdown")
    return parser


def _whole_numbers(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return value


def _show(argv: Sequence[str]) -> int:
    """Print a stored run, and write its page and its Markdown again."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench show", description="Print a stored run and write its page again."
    )
    add = parser.add_argument
    add("source", type=Path, metavar="FILE.json")
    add("--markdown", action="store_true", help="print Markdown")
    said = "write every figure of the page as an SVG"
    add("--figures", type=Path, metavar="FOLDER", help=said)
    options = parser.parse_args(argv)
    record = SuiteRecord.read(options.source, "FILE.json")
    code = _print(record, options.source, options.markdown)
    if options.figures is not None:
        options.figures.mkdir(parents=True, exist_ok=True)
        for name, drawing in pictures(record).items():
            (options.figures / f"{name}.svg").write_text(drawing, encoding="utf-8")
    return code


def _compare(argv: Sequence[str]) -> int:
    """Compare two records; with ``--check`` 1 where ours got slower by more than the noise."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench compare",
        description="Ratios of two runs, and what moved by more than the noise of their rounds.",
    )
    add = parser.add_argument
    add("before", type=Path, metavar="A.json")
    add("after", type=Path, metavar="B.json")
    add("--all", action="store_true", help="also what did not move")
    add("--markdown", action="store_true", help="print Markdown")
    add("--check", action="store_true", help="fail if tilewise got slower")
    options = parser.parse_args(argv)
    before, after = compare.read(options.before, "A.json"), compare.read(options.after, "B.json")
    table = compare.table(before, after, every=options.all)
    show_tables([f"{options.before} -> {options.after}"], [table], options.markdown)
    moved = compare.compare(before, after)
    slower = any(each.word == "slower" and each.point.method == OURS for each in moved)
    return int(options.check and slower)
