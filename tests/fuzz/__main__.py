"""Draw random calls and compare them with float64: ``./run fuzz`` (see CONTRIBUTING.md).

./run fuzz --minutes 10                 until the time is up, from a fresh seed that is printed
./run fuzz --problems 20000 --seed 7    so many problems, from this seed on
./run fuzz --one 1234                   one seed again, made smaller if it fails
./run fuzz --case "Case(...)"           one case again, as it was printed
./run fuzz --minutes 5 --guard-pages    every tensor against a page that kills who touches it
./run fuzz --minutes 5 --sanitize       with a core under AddressSanitizer and UBSan
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import tilewise._core as core
from tests.fuzz.case import Case, reread
from tests.fuzz.check import isa_of
from tests.fuzz.draw import draw
from tests.fuzz.shrink import shrink
from tests.fuzz.snippet import snippet
from tests.fuzz.worker import Verdict, one, pool

ROOT = Path(__file__).resolve().parents[2]
_TOLD_S = 15.0


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./run fuzz",
        description=__doc__.split("\n")[0],
        epilog="\n".join(__doc__.split("\n")[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, help="how long (default 1, where nothing says)")
    parser.add_argument("--problems", type=int, help="how many problems instead")
    parser.add_argument("--seed", type=int, help="of the first problem; others follow it")
    parser.add_argument("--one", type=int, metavar="SEED", help="check one seed")
    parser.add_argument("--case", help="check one case, as it was printed")
    parser.add_argument("--show", action="store_true", help="print the case of --one and stop")
    parser.add_argument(
        "--guard-pages", action="store_true", help="put tensors against guard pages"
    )
    parser.add_argument("--sanitize", action="store_true", help="use a core with sanitizers")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they are")
    parser.add_argument(
        "--report-inexact",
        action="store_true",
        help="print what is up to 100 times over the 2x rule, and fail for anything else alone",
    )
    parser.add_argument("--jobs", type=int, help="processes at once (default: one per core)")
    return parser.parse_args(words)


def _guard(options: argparse.Namespace, seed: int) -> str:
    """The side that tensors of a seed are guarded on, if they are."""
    return ("end", "end", "begin")[seed % 3] if options.guard_pages else ""


class Tally:
    """What was checked, and what failed."""

    def __init__(self, first: int) -> None:
        self.first, self.started = first, time.monotonic()
        self.by: dict[str, Counter[str]] = {"dtype": Counter(), "isa": Counter(), "kind": Counter()}
        self.done = self.backward = 0
        self.failed: list[Verdict] = []
        self.printed = self.started

    def add(self, verdict: Verdict, case: Case) -> None:
        """Count one verdict."""
        self.done += 1
        self.by["dtype"][case.dtype] += 1
        self.by["isa"][isa_of(case)] += 1
        self.by["kind"][_form(case)] += 1
        self.backward += case.differentiated
        if verdict.kind:
            self.failed.append(verdict)
        if time.monotonic() - self.printed > _TOLD_S:
            self.printed = time.monotonic()
            print(f"{self.line()}, at seed {verdict.seed}", flush=True)

    def line(self) -> str:
        """How far it is."""
        seconds = time.monotonic() - self.started
        rate = self.done / max(seconds, 1e-9)
        return (
            f"{self.done} problems, {len(self.failed)} failed, {seconds:.0f} s, {rate:.1f} a second"
        )

    def end(self) -> str:
        """One line of counts."""
        counts = "; ".join(
            ", ".join(f"{name} {count}" for name, count in counter.most_common())
            for counter in self.by.values()
        )
        return f"{self.line()}; {self.backward} with gradients; {counts}; from seed {self.first}"


def _form(case: Case) -> str:
    if case.page_size:
        return "paged"
    return "dense" if case.sequences is None else "packed"


def _cases(
    options: argparse.Namespace, first: int, jobs: int, place: int, after: int | None
) -> Iterator[tuple[int, Case, str]]:
    """The cases of one child: every ``jobs``-th seed."""
    seed = first + place if after is None else after + jobs
    while options.problems is None or seed < first + options.problems:
        yield seed, draw(seed), _guard(options, seed)
        seed += jobs


def _report(options: argparse.Namespace, case: Case, verdict: Verdict) -> None:
    """Print a failure, made smaller."""
    guard = _guard(options, verdict.seed)
    print(f"\nFAILED seed {verdict.seed}: {verdict.kind}\n{verdict.words}", flush=True)
    if not options.no_shrink:
        case = shrink(case, lambda smaller: one(smaller, guard)[0] or None, say=print)
        kind, words = one(case, guard)
        print(f"made smaller: {kind}: {words}")
    again = " --guard-pages" if guard else ""
    again += " --sanitize" if options.sanitize else ""
    print(f"the seed again:  ./run fuzz{again} --one {verdict.seed}")
    print(f'the case again:  ./run fuzz{again} --case "{case!r}"')
    print(f"the call:\n\n{snippet(case)}", flush=True)


def _again(options: argparse.Namespace) -> int:
    """One case."""
    seed = options.one if options.one is not None else 0
    case = reread(options.case) if options.case else draw(seed)
    if options.show:
        print(repr(case))
        print(snippet(case))
        return 0
    kind, words = one(case, _guard(options, seed))
    if kind:
        _report(options, case, Verdict(seed, kind, words, 0.0))
        return 1
    print(f"it holds: {case!r}")
    return 0


def _sanitized(words: Sequence[str]) -> None:
    """The same command in the environment of scripts/other_core.sh, where that is not here yet."""
    if "build/sanitize" in core.__file__:
        return
    if "TILEWISE_SANITIZED" in os.environ:
        sys.exit(f"fuzz: scripts/other_core.sh ran a core without sanitizers: {core.__file__}")
    os.environ["TILEWISE_SANITIZED"] = "1"
    script = str(ROOT / "scripts" / "other_core.sh")
    os.execv(script, [script, "sanitize", "--module", "tests.fuzz", *words])


def main(words: Sequence[str]) -> int:
    """Run the command; 1 where something failed."""
    options = _arguments(words)
    if options.sanitize:
        _sanitized(words)
    if options.one is not None or options.case:
        return _again(options)
    jobs = options.jobs or max(1, len(os.sched_getaffinity(0)))
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    minutes = options.minutes if options.minutes or options.problems else 1.0
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    print(f"fuzz: seeds from {first}, {jobs} processes", flush=True)
    tally = Tally(first)
    for verdict in pool(lambda i, after: _cases(options, first, jobs, i, after), jobs, until):
        case = draw(verdict.seed)
        tally.add(verdict, case)
        if verdict.kind:
            _report(options, case, verdict)
    print(tally.end(), flush=True)
    fatal = [each for each in tally.failed if not _only_reported(options, each)]
    if len(fatal) < len(tally.failed):
        print(f"over the 2x rule, reported and not fatal here: {len(tally.failed) - len(fatal)}")
    return 1 if fatal else 0


def _only_reported(options: argparse.Namespace, verdict: Verdict) -> bool:
    """Whether a failure is printed and does not change the exit status."""
    return bool(options.report_inexact) and verdict.kind == "inexact"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
