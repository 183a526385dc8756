"""``tilewise bench``: measure, print the tables, write the JSON.

Exit status: 0 done, 1 a case is wrong, below ``--check`` or failed, 2 wrong usage, 130 stopped with
Ctrl-C (what was done by then is printed and written).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tilelab.bench import children
from tilelab.bench.cases import CASES, DTYPES, Case
from tilelab.bench.measure import FULL, QUICK, measure_cases, overhead
from tilelab.bench.results import COMPLETE, Record
from tilelab.bench.tables import heading, tables
from tilelab.common.tables import show_tables
from tilelab.common.terminal import Progress, crowded, positive
from tilelab.common.worker import environment
from tilewise.errors import TilewiseError, Unsupported
from tilewise.inspect.peaks import absence

_INTERRUPTED = "stopped with Ctrl-C"
_SCALING_S = 0.6  # for the rounds of one case on one and two threads
_LONG = 16384  # queries and keys of the memory measurement


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench.

    Args:
        argv: the options; None takes them from the command line.

    Returns:
        the exit status (see the module).

    Raises:
        Unsupported: there is no compiled core to measure.
        InvalidArgument: ``--from`` names no record of the bench.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(given)
    if options.source is not None:
        record = Record.read(options.source)
        _show(record, options)
        return _status(record, options.check)
    cases = _chosen(options)
    if not cases:
        parser.error(f"no case matches --cases {options.cases!r}; the cases: {_names()}")
    missing = absence()
    if missing:
        raise Unsupported("the bench measures the compiled core", {"cpu": [missing]})
    if warning := crowded(options.threads):
        print(f"tilewise bench: {warning}", file=sys.stderr)
    if options.threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        # Torch read the setting when it was loaded: start again with it.
        command = [sys.executable, "-m", "tilelab.bench", *given]
        os.execve(sys.executable, command, environment())
    record = Record.begin(options.threads)
    _run(record, cases, options)
    _show(record, options)
    path = _path(record, options)
    if path is not None:
        record.write(path)
        print(f"\nAll samples: {path}", file=sys.stderr)
    return 130 if record.status == _INTERRUPTED else _status(record, options.check)


def _show(record: Record, options: argparse.Namespace) -> None:
    """Print the tables of a record."""
    show_tables(heading(record), tables(record, brief=options.brief), options.markdown)


def _run(record: Record, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Measure everything into the record; Ctrl-C ends it early."""
    effort = QUICK if options.quick else FULL
    if options.rounds:
        effort = replace(effort, rounds=(options.rounds, options.rounds))
    everything = not (options.quick or options.cases or options.dtype or options.threads > 1)
    began = time.perf_counter()
    status = COMPLETE
    try:
        with Progress(_steps(len(cases), everything, options.quick)) as progress:
            results = measure_cases(cases, effort, options.threads)
            for case in cases:
                progress.step(case.key)
                record.cases.append(next(results))
            if everything or options.quick:
                progress.step("the cost of a call")
                record.overhead += overhead(effort.rounds[1])
            if everything:
                _in_children(record, cases, progress)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except TilewiseError as error:
        status = "a measurement failed"  # the words may name folders, and the record must not
        print(f"\ntilewise bench: {error}", file=sys.stderr)
    record.end(status, time.perf_counter() - began)


def _steps(cases: int, everything: bool, quick: bool) -> int:
    """Count the steps: each case, each on two threads, the cost of a call, eight of memory."""
    return 2 * cases + 1 + 1 + 8 if everything else cases + quick


def _in_children(record: Record, cases: Sequence[Case], progress: Progress) -> None:
    """Run the measurements that need processes of their own: scaling and memory."""
    if record.machine["cores"] > 1:
        found = children.scaling([case.key for case in cases], _SCALING_S)
        with closing(found):
            for case in cases:
                progress.step(f"two threads: {case.key}")
                record.scaling.append(next(found))
    progress.step("memory")
    for each in children.memory(_LONG):
        record.memory.append(each)
        progress.step(f"memory: {each.name}")


def _chosen(options: argparse.Namespace) -> list[Case]:
    wanted = options.dtype or DTYPES
    return [
        case
        for case in CASES
        if case.dtype in wanted
        and (options.cases or "") in case.key
        and (case.quick or not options.quick)
    ]


def _names() -> str:
    return ", ".join(dict.fromkeys(case.name for case in CASES))


def _path(record: Record, options: argparse.Namespace) -> Path | None:
    """Return where the JSON goes: a part of the bench never replaces a whole one."""
    if options.json is not None:
        return Path(options.json)
    if options.quick or options.cases or options.dtype or options.rounds or options.threads > 1:
        return None
    name = "cpu.json" if record.status == COMPLETE else "cpu-partial.json"
    return Path("benchmarks", record.slug, name)


def _status(record: Record, check: float | None) -> int:
    """1 for a wrong case, a failure, or a ratio below the check where ratios are promised."""
    failed = record.status not in (COMPLETE, _INTERRUPTED)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise bench",
        description="Measure attention against torch's scaled_dot_product_attention, in turn in "
        "one process, and against the machine's own peak.",
        epilog="The whole bench takes minutes and writes benchmarks/<chip>/cpu.json; a part of it "
        "writes only where --json says. Suites are beside it: tilewise bench speed, memory, "
        "accuracy, paper, models, variants or all (each with --help), tilewise bench show FILE, "
        "and tilewise bench compare A.json B.json.",
    )
    add = parser.add_argument
    add("what", nargs="?", choices=("cpu",), default="cpu", help="what to measure")
    add("--quick", action="store_true", help="few cases, less than a minute")
    add("--cases", metavar="TEXT", help="only cases whose name and dtype contain this")
    add("--dtype", action="append", choices=DTYPES, help="only this dtype (repeat for more)")
    add("--rounds", type=positive, metavar="N", help="rounds of every case")
    add("--threads", type=positive, default=1, metavar="N", help="more than one: wall time (1)")
    add("--check", type=float, metavar="R", help="fail if a ratio is below R")
    add("--json", metavar="FILE", help="write all samples here")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--brief", action="store_true", help="print dtypes side by side, without times")
    add(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="print the tables of a stored JSON and measure nothing",
    )
    return parser
