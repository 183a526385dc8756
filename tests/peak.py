"""Peak resident memory, measured in processes of their own, on Linux."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT, ran

_BLOCK = 65536  # bytes: larger blocks come from the system, and go back when they are freed
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt

only_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)


class Peak:
    """What the process takes beyond what it had, from here on.

    Memory that earlier calls freed goes back to the system first: with it a call would seem to take
    nothing.
    """

    def __init__(self) -> None:
        with suppress(AttributeError):  # another C library than glibc
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_THRESHOLD, _BLOCK)
            library.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_mib("VmRSS")

    def mib(self) -> float:
        """The most so far."""
        return _status_mib("VmHWM") - self._before


def _status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def printed(code: str, *words: object) -> list[list[str]]:
    """The words of each line that a program prints, run with these arguments."""
    # What one call frees must go back to the system, or the next one would seem to take nothing.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(_BLOCK)}
    done = ran(sys.executable, "-c", code, *words, timeout=None, cwd=ROOT, env=environment)
    return [line.split() for line in done.stdout.splitlines()]
