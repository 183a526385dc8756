"""``python -m tilelab.counted``: every case under valgrind's cachegrind, against the model.

Valgrind runs the native driver on a simulated CPU, one thread at a time, with caches of the given
sizes. The counts are therefore the same on every machine, except for the addresses where memory
begins. It knows no AVX-512, no prefetcher and no write-back. A line is fetched into the cache at
the first read or write of it, which is what ``cases`` predicts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tilelab.counted.cases import CASES, QUICK, SWEEP, Case, Row, table, verdict
from tilewise.errors import InvalidArgument, TilewiseError

LINE = 64  # bytes
_WAYS = (16, 12, 20, 14, 18)
_FIRST = f"32768,8,{LINE}"  # the first level: large enough for a panel, small against the rooms
_LIMIT_S = 600


class CountingError(TilewiseError):
    """Valgrind, or what ran in it, did not come to its end."""


def absence(driver: Path) -> str | None:
    """Why nothing can be counted here; None where it can."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed (Debian, Ubuntu: apt install valgrind)"
    if not driver.exists():
        return f"{driver} is not built: scripts/counted.sh does that"
    return None


def misses(text: str) -> int:
    """Data misses of the last level, from the file that cachegrind writes.

    ``events:`` names the columns, and ``summary:`` has their totals.

    Raises:
        CountingError: it has no such columns.
    """
    found = dict(re.findall(r"^(events|summary):\s*(.*)$", text, re.MULTILINE))
    names, totals = (found.get(key, "").split() for key in ("events", "summary"))
    columns = dict(zip(names, totals, strict=False))
    if len(names) != len(totals) or not {"DLmr", "DLmw"} <= columns.keys():
        raise CountingError(
            f"cachegrind's file has no totals of DLmr and DLmw, but {', '.join(names) or 'nothing'}"
        )
    return int(columns["DLmr"]) + int(columns["DLmw"])


def ways(cache: int) -> int:
    """Lines of a set of a cache of that size: cachegrind wants a power of two of sets.

    Raises:
        InvalidArgument: no usual number of ways gives one.
    """
    for found in _WAYS:
        sets, rest = divmod(cache, found * LINE)
        if rest == 0 and sets > 0 and sets & (sets - 1) == 0:
            return found
    raise InvalidArgument("cache", f"{cache} bytes", "2^n KiB times 1, 3, 5, 7 or 9")


def counted(driver: Path, cache: int, arguments: Mapping[str, str | int]) -> int:
    """Data misses of the last level in one run of the driver.

    Raises:
        CountingError: with the last words of the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        command = [
            "valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--I1={_FIRST}", f"--D1={_FIRST}",
            f"--LL={cache},{ways(cache)},{LINE}", f"--cachegrind-out-file={out}", str(driver),
            *(f"{name}={value}" for name, value in arguments.items()),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise CountingError(f"{command[-1]}: not done after {_LIMIT_S} s") from None
        if done.returncode != 0:
            words = " ".join(done.stderr.split())[-400:]
            raise CountingError(f"{driver.name} ended with {done.returncode}: {words}")
        return misses(out.read_text())


def version() -> str:
    """Return the version that valgrind prints."""
    done = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


FORMAT = 1
NO_AVX2 = 3  # the driver's exit status
_DRIVER = Path("build/native/counted")
Counter: TypeAlias = Callable[[int, Mapping[str, str | int]], int]


def count(cases: Sequence[Case], counter: Counter) -> Iterator[Row]:
    """Yield the rows of cases: misses of a run minus misses of the same run without attention.

    ``counter`` gives the misses of a run, from the bytes of the cache and the driver's arguments.
    """
    before: dict[str, int] = {}
    for case in cases:
        # Without attention, tasks, masks and lists are nothing to a run.
        about = ("threads", "causal", "listed")
        setup = {k: v for k, v in case.arguments.items() if k not in about}
        key = f"{case.cache} {setup}"
        if key not in before:
            before[key] = counter(case.cache, {"what": "nothing", **setup})
        misses = counter(case.cache, {"what": case.method, **case.arguments})
        yield Row(case, (misses - before[key]) * LINE, case.predicted().bytes)


def compared(driver: Path) -> tuple[int, str]:
    """Compare ours with the driver's plain attention; return the status and the output.

    0: they give the same numbers; ``NO_AVX2``: this processor cannot run what would be counted.
    """
    sizes = ["queries=130", "keys=200", "heads=2"]
    done = subprocess.run(
        [str(driver), "what=compare", *sizes], capture_output=True, text=True, check=False
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def main(argv: Sequence[str] | None = None) -> int:
    """Count, compare, and print the table.

    Returns:
        0 where everything is as close as it has to be, or nothing can be counted here (a line says
        why); 1 where something is not.
    """
    options = _parser().parse_args(argv)
    if options.stored is not None:
        stored = json.loads(options.stored.read_text())
        return _show([Row.read(each) for each in stored["rows"]])
    reason = absence(options.driver)
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    status, said = compared(options.driver)
    if status == NO_AVX2:
        print(f"skipped: {said}")
        return 0
    if status != 0:
        print(f"counted: ours and plain attention differ ({status}): {said}", file=sys.stderr)
        return 1
    begun = time.perf_counter()

    def rows_of(cases: Sequence[Case]) -> list[Row]:
        rows = []
        for row in count(cases, partial(counted, options.driver)):
            print(f"{row.case.name}: {100 * row.off:+.1f} %", file=sys.stderr, flush=True)
            rows.append(row)
        return rows

    rows = rows_of(QUICK if options.quick else CASES)
    if options.json is not None:
        sweep = [] if options.quick else rows_of(SWEEP)
        made: dict[str, Any] = {
            "format": FORMAT,
            "valgrind": version(),
            "seconds": round(time.perf_counter() - begun),
            "rows": [row.as_json() for row in rows],
            "sweep": [row.as_json() for row in sweep],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return _show(rows)


def _show(rows: Sequence[Row]) -> int:
    print(table(rows))
    print()
    print(verdict(rows))
    return 0 if all(row.holds for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tilelab.counted",
        description="Hold predicted bytes against the last-level misses that cachegrind counts.",
        epilog="Ends with 1 where a case is off by more than 15 % (ours) or 20 % (plain).",
    )
    add = parser.add_argument
    add("--driver", type=Path, default=_DRIVER, metavar="FILE", help=f"default {_DRIVER}")
    add("--quick", action="store_true", help="what continuous integration runs")
    add("--json", type=Path, metavar="FILE", help="store the counts, and without --quick a sweep")
    add("--from", dest="stored", type=Path, metavar="FILE", help="the table of stored counts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
