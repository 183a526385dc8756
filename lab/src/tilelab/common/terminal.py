"""The terminal of a command: text, durations, progress, warnings, options and Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich.text
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tilewise.commands import visible


class Text(rich.text.Text):
    r"""Rich's text, with every control character shown by its code, like ``\x1b``."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(visible(text), *args, **options)

    def append(self, text: rich.text.Text | str, *args: Any, **options: Any) -> rich.text.Text:
        """Add to the end, as rich's does."""
        return super().append(visible(text) if isinstance(text, str) else text, *args, **options)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a text, which the terminal wraps itself."""
    console.print(Text(text, style=style), soft_wrap=True)


def in_words(seconds: float) -> str:
    """Return a duration in words: ``4.5 s``, ``45 s``, ``6:05 min``, ``3:20 h``, ``2.5 days``."""
    if 0 < seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{seconds / 86400:.1f} days"


class Progress:
    """The progress of a run, within a ``with`` block."""

    def __init__(self, total: int, console: Console) -> None:
        self._console, self._total, self._begun = console, total, 0
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
        )
        # Drawing takes time from what is measured: seldom.
        self._bar = Bar(*columns, console=self._console, refresh_per_second=1)
        self._task = self._bar.add_task("", total=total, left="")

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self.skip(0)
            self._bar.stop()

    def step(self, name: str, left: str = "") -> None:
        """Begin a step; the one before it is over."""
        self._bar.update(self._task, completed=self._begun, description=name, left=left)
        self._begun += 1
        if not self._console.is_terminal:
            words = ", ".join(filter(None, (f"[{self._begun}/{self._total}] {name}", left)))
            self._console.out(words, highlight=False)

    def skip(self, count: int) -> None:
        """So many steps will not be done; the one before them is over."""
        self._begun += count
        self._bar.update(self._task, completed=self._begun)


def positive(text: str) -> int:
    """Return a whole number of a command's option.

    Raises:
        argparse.ArgumentTypeError: it is not 1 or more.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def crowded(threads: int) -> str:
    """Return a warning where so many threads would share a core; empty where they need not."""
    affinity = hasattr(os, "sched_getaffinity")  # Linux: the cores that this process may use
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    if threads <= cores:
        return ""
    return (
        f"Warning: --threads {threads} on {cores} core{'s' if cores > 1 else ''}: threads wait "
        f"for one another, so it is slower and says little. Take at most {cores}."
    )


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
