"""Last-level misses of a native process, counted by valgrind's cachegrind.

Valgrind runs the process on a simulated CPU, one thread at a time, with caches of the given sizes.
The counts are therefore the same on every machine, except for the addresses where memory begins. It
knows no AVX-512, no prefetcher and no write-back. A line is fetched into the cache at the first
read or write of it, which is what ``fills`` predicts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

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

    Args:
        text: of the file: ``events:`` names the columns, and ``summary:`` has their totals.

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
