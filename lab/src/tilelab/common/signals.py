"""Ctrl-C, when what the first one asked for is still being done."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupts_ignored"]


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """A second Ctrl-C must not cost the orderly end that the first one asked for."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, where no signal arrives anyway
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
