"""Output of a running study: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from tilelab.common.durations import in_words
from tilelab.common.terminal import Text
from tilelab.study.ask.config import Study
from tilelab.study.ask.run import RunSpec
from tilelab.study.conduct.board import Board, Lane
from tilelab.study.records.events import RunRecord
from tilewise.commands.visible import visible

__all__ = ["LineProgress", "LiveProgress", "showing"]

# Drawing takes time from the runs that share the processor with it.
_REDRAW_S = 1.0
_LINE_S = 15.0
_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "diverged": "✗"}
_STYLES = {"waiting": "dim", "running": "bold", "done": "green", "diverged": "red"}


class LineProgress:
    """Writes a line when a run ends, and one now and then in between.

    Args:
        board: what to show; it is kept up to date here.
        console: where to.
    """

    def __init__(self, board: Board, console: Console) -> None:
        self._board, self._console = board, console
        self._next = time.monotonic() + _LINE_S

    def started(self, run: RunSpec) -> None:
        """A process took up a run."""
        self._board.started(run)

    def event(self, run: RunSpec, values: dict[str, Any]) -> None:
        """A line was added to the run's record."""
        self._board.event(run, values)

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        """A run is over."""
        self._board.ended(run, record)
        self._line(_ended_words(run, record))

    def lost(self, run: RunSpec, why: str) -> None:
        """The worker of a run went away."""
        self._board.lost(run)
        self._line(f"{run.name} was lost ({why}) and will be taken up again")

    def tick(self) -> None:
        """Say how far the runs are, if that was long ago."""
        if time.monotonic() < self._next:
            return
        running = [lane for lane in self._board.lanes.values() if lane.status == "running"]
        self._line(", ".join(f"{lane.run.name} {_cell_words(lane)}" for lane in running))

    def _line(self, words: str) -> None:
        self._next = time.monotonic() + _LINE_S
        # Not wrapped and not coloured: it is for a file or a pipe.
        self._console.out(visible(f"{_counts(self._board)}: {words}"), highlight=False)


class LiveProgress:
    """Keeps a table of arms by seeds on the terminal.

    Args:
        study: whose experiments give the table its order.
        board: what to show; it is kept up to date here.
        live: the part of the screen.
    """

    def __init__(self, study: Study, board: Board, live: Live) -> None:
        self._study, self._board, self._live = study, board, live
        self._next = 0.0

    def started(self, run: RunSpec) -> None:
        """A process took up a run."""
        self._board.started(run)

    def event(self, run: RunSpec, values: dict[str, Any]) -> None:
        """A line was added to the run's record."""
        self._board.event(run, values)

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        """A run is over."""
        self._board.ended(run, record)

    def lost(self, run: RunSpec, why: str) -> None:
        """The worker of a run went away."""
        self._board.lost(run)
        words = f"{run.name} was lost ({why}) and will be taken up again"
        self._live.console.print(Text(words), soft_wrap=True)

    def tick(self) -> None:
        """Draw, if that was long enough ago."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REDRAW_S
            self.draw()

    def draw(self) -> None:
        """Draw the table as things are now."""
        self._live.update(picture(self._study, self._board), refresh=True)


@contextmanager
def showing(study: Study, board: Board, console: Console) -> Iterator[LiveProgress | LineProgress]:
    """The progress that suits the console, from before the first run until after the last."""
    if not console.is_terminal:
        yield LineProgress(board, console)
        return
    with Live(console=console, auto_refresh=False) as live:
        progress = LiveProgress(study, board, live)
        try:
            yield progress
        finally:
            board.stopped()
            progress.draw()


def picture(study: Study, board: Board) -> RenderableType:
    """Return a table of every experiment that is under way, and a line for the others."""
    parts: list[RenderableType] = []
    names = [each.name for each in study.experiments]
    # Stages that follow from an experiment are not in the config.
    for name in dict.fromkeys([*names, *(lane.run.experiment for lane in board.lanes.values())]):
        lanes = [each for each in board.lanes.values() if each.run.experiment == name]
        over = sum(lane.status in ("done", "diverged") for lane in lanes)
        begun = any(lane.status != "waiting" or lane.step for lane in lanes)
        if begun and over < len(lanes):
            parts.append(_table(name, lanes))
        else:
            state = "done" if over == len(lanes) else "waiting"
            parts.append(Text(f"{name}: {len(lanes)} runs, {state}", style="dim"))
    parts.append(Text(_counts(board), style="bold"))
    return Group(*parts)


def _table(name: str, lanes: list[Lane]) -> Table:
    swept = any(lane.run.phase == "sweep" for lane in lanes)
    seeds = dict.fromkeys(lane.run.seed for lane in lanes if lane.run.phase == "final")
    table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("arm")
    if swept:
        table.add_column("trials", justify="right")
    for seed in seeds:
        table.add_column(f"seed {seed}")
    table.add_column("tokens/s", justify="right")
    for arm in dict.fromkeys(lane.run.arm for lane in lanes):
        own = [lane for lane in lanes if lane.run.arm == arm]
        tried = [lane for lane in own if lane.run.phase == "sweep"]
        over = sum(lane.status in ("done", "diverged") for lane in tried)
        finals = {lane.run.seed: lane for lane in own if lane.run.phase == "final"}
        cells = [_cell(finals[seed]) if seed in finals else Text("") for seed in seeds]
        speeds = [speed for lane in own if (speed := lane.tokens_s)]
        pace = Text(f"{speeds[-1]:,.0f}" if speeds else "")
        count = [Text(f"{over}/{len(tried)}")] if swept else []
        table.add_row(Text(arm), *count, *cells, pace)
    return table


def _cell(lane: Lane) -> Text:
    words = f"{_MARKS[lane.status]} {_cell_words(lane)}".rstrip()
    return Text(words, style=_STYLES[lane.status], no_wrap=True)


def _cell_words(lane: Lane) -> str:
    if lane.status == "diverged":
        return f"diverged at step {lane.step}" if lane.step else "every candidate diverged"
    value = lane.held_out if lane.status == "done" else lane.loss
    loss = "" if value is None else f" {value:.3f}"
    if lane.status == "done" or not lane.step:
        return loss.strip()
    return f"{lane.step}/{lane.run.config.steps}{loss}"


def _ended_words(run: RunSpec, record: RunRecord) -> str:
    if record.diverged:
        assert record.end is not None
        return f"{run.name} diverged: {record.end.reason}"
    last = record.evaluations[-1] if record.evaluations else None
    if last is None or last.loss is None:
        return f"{run.name} done"
    return f"{run.name} done, held-out loss {last.loss:.4f}, {in_words(last.train_wall_s)}"


def _counts(board: Board) -> str:
    left = board.left_s()
    time_left = f", {in_words(left)} left" if board.done < len(board.lanes) else ""
    return f"{board.done} of {len(board.lanes)} runs{time_left}"
