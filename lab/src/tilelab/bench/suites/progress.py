"""Progress of a run: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilelab.common.durations import in_words

__all__ = ["Steps", "showing"]


class Steps:
    """Tells of steps as they begin.

    Args:
        total: how many there are.
        console: where to.
        bar: of a terminal; None elsewhere.
    """

    def __init__(self, total: int, console: Console, bar: Progress | None) -> None:
        self._total, self._done, self._console, self._bar = total, 0, console, bar
        self._task = None if bar is None else bar.add_task("", total=total, left="")

    def begin(self, name: str, left_s: float) -> None:
        """A step begins.

        Args:
            name: of the step.
            left_s: of the budget.
        """
        left = f"{in_words(max(left_s, 0.0))} of the budget left"
        if self._bar is None or self._task is None:
            words = f"[{self._done + 1}/{self._total}] {name}, {left}"
            self._console.out(words, highlight=False)
            return
        self._bar.update(self._task, description=name, left=left)

    def end(self) -> None:
        """It is over."""
        self.skip(1)

    def skip(self, count: int) -> None:
        """So many steps are over, or will not be done."""
        self._done += count
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)


@contextmanager
def showing(total: int, console: Console) -> Iterator[Steps]:
    """The progress that suits a console."""
    if not console.is_terminal:
        yield Steps(total, console, None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )
    # Drawing takes time from what is measured: seldom.
    with Progress(*columns, console=console, refresh_per_second=1) as bar:
        yield Steps(total, console, bar)
