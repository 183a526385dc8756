"""The progress of a study: every run's state and the time that is left, and how they are shown.

A terminal has a live table, anything else a line now and then.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from tilelab.common.terminal import Text, in_words
from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.metrics import METRICS
from tilelab.study.ask.run import RunSpec
from tilelab.study.plan import Agenda, Watcher
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.result import ArmVerdict, ExperimentVerdict, StudyVerdict
from tilelab.study.verdict.sweeps import expected_trials, known_trials
from tilelab.study.verdict.text import count
from tilewise.commands import visible

Status = Literal["waiting", "running", "done", "diverged"]
_RECENT = 16  # steps whose median is the pace


@dataclass
class Lane:
    """One run."""

    run: RunSpec
    status: Status = "waiting"  # a run that was begun and stopped is waiting
    step: int = 0  # optimizer steps done
    loss: float | None = None  # of the last step's batch; nats per token
    held_out: float | None = None  # the last loss
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  # recent
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))  # learnt from in them

    @property
    def pace_s(self) -> float | None:
        """Seconds of a step; None where none was seen."""
        return statistics.median(self.step_s) if self.step_s else None

    @property
    def tokens_s(self) -> float | None:
        """Tokens per second of recent steps."""
        pace = self.pace_s
        return statistics.fmean(self.tokens) / pace if pace and self.tokens else None


class Board(Watcher):
    """Keeps the state of all runs; ``forecast_s`` has seconds that each was expected to take."""

    def __init__(self, agenda: Agenda, forecast_s: Mapping[str, float], jobs: int) -> None:
        self._agenda, self._forecast_s, self._jobs = agenda, forecast_s, jobs
        known = [run for run in agenda.runs if run.name in forecast_s]
        steps = sum(run.config.steps for run in known)
        self._step_s = sum(forecast_s[run.name] for run in known) / steps if steps else 0.0
        self._begun: dict[str, tuple[float, float]] = {}  # when, and what share was left then
        self._ratios: list[float] = []  # seconds that runs took over those that were expected
        self._took: list[float] = []  # seconds of whole runs
        self.lanes: dict[str, Lane] = {}
        self._expect()
        for name, record in agenda.records.items():
            if name in self.lanes:
                self._take_over(self.lanes[name], record)
        for run in agenda.runs:
            self._give_up_after(run)

    def _expect(self) -> None:
        """Replace the expected runs by those that are known now, those that are over too."""
        lanes = {run.name: Lane(run) for run in self._agenda.runs}
        kept = {name: each for name, each in self.lanes.items() if name in lanes or _begun(each)}
        self.lanes = {**lanes, **kept}

    def started(self, run: RunSpec) -> None:
        """A process took up a run."""
        # What a sweep chose is known now.
        lane = self.lanes.setdefault(run.name, Lane(run))
        lane.run, lane.status = run, "running"
        self._begun[run.name] = time.monotonic(), _share_left(lane)

    def event(self, run: RunSpec, values: Mapping[str, Any]) -> None:
        """A line was added to the run's record."""
        lane = self.lanes[run.name]
        if values["event"] == "start":
            # Less than its record has, where the checkpoint is older, or is not here.
            lane.step = values["from_step"]
            if run.name in self._begun:
                self._begun[run.name] = self._begun[run.name][0], _share_left(lane)
        elif values["event"] == "step":
            lane.step, lane.loss = values["step"], values["loss"]
            if lane.run.config.learning.external:
                return  # the time of a line says nothing of the next one's
            if not values["warmup"] or lane.pace_s is None:
                lane.step_s.append(values["wall_s"])
                lane.tokens.append(values.get("tokens") or lane.run.config.tokens_per_step)
        elif values["event"] == "evaluation":
            lane.held_out = values["loss"]

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        """A run is over."""
        begun, share = self._begun.pop(run.name, (0.0, 0.0))
        expected = self._expected_s(run) * share
        copied = bool(record.starts and record.start.same_as)
        if share == 1.0 and not copied:
            self._took.append(time.monotonic() - begun)
        if expected and not copied:
            self._ratios.append((time.monotonic() - begun) / expected)
        self._take_over(self.lanes[run.name], record)
        self._give_up_after(run)
        self._expect()  # what follows from the run is known now

    def lost(self, run: RunSpec, why: str) -> None:
        """The worker of a run went away: the run waits again."""
        self.paused(run)

    def paused(self, run: RunSpec) -> None:
        """A run stopped at a checkpoint: it waits again."""
        self._begun.pop(run.name, None)
        self.lanes[run.name].status = "waiting"

    def stopped(self) -> None:
        """Nothing runs any more."""
        for lane in self.lanes.values():
            if lane.status == "running":
                lane.status = "waiting"

    @property
    def done(self) -> int:
        """Runs that are over."""
        return sum(map(_over, self.lanes.values()))

    def left_s(self) -> float:
        """Return seconds that the rest takes: as forecast, corrected by what runs took so far."""
        correction = statistics.median(self._ratios) if self._ratios else 1.0
        return makespan(
            [(self._left_of(run.name, correction), run.alone) for run in self._agenda.runs],
            self._jobs,
        )

    def _give_up_after(self, trial: RunSpec) -> None:
        """An arm whose every candidate diverged with some seed has no runs that count."""
        if trial.phase != "sweep":
            return
        own = [
            lane
            for lane in self.lanes.values()
            if (lane.run.experiment, lane.run.arm) == (trial.experiment, trial.arm)
        ]
        trials = [lane for lane in own if lane.run.phase == "sweep"]
        lost = {lane.run.candidate for lane in trials if lane.status == "diverged"}
        if all(map(_over, trials)) and lost == {lane.run.candidate for lane in trials}:
            for lane in own:
                if lane.run.phase == "final":
                    lane.status = "diverged"

    def _left_of(self, name: str, correction: float) -> float:
        lane = self.lanes[name]
        if _over(lane):
            return 0.0
        pace, share = lane.pace_s, _share_left(lane)
        if lane.status == "running" and pace is not None:
            return pace * lane.run.config.steps * share
        if lane.run.config.learning.external:
            begun, _ = self._begun.get(name, (time.monotonic(), 1.0))
            return max(0.0, self._expected_s(lane.run) - (time.monotonic() - begun))
        return self._expected_s(lane.run) * correction * share

    def _expected_s(self, run: RunSpec) -> float:
        """Return the forecast; without one, what the run's steps take in the mean of others."""
        if run.name in self._forecast_s:
            return self._forecast_s[run.name]
        if not self._step_s and self._took:  # scripts, which nobody can forecast
            return statistics.median(self._took)
        return self._step_s * run.config.steps

    def _take_over(self, lane: Lane, record: RunRecord) -> None:
        if record.end is not None:
            lane.status = record.end.status
        if record.steps:
            lane.step, lane.loss = record.steps[-1].step, record.steps[-1].loss
        if record.evaluations:
            lane.held_out = record.evaluations[-1].loss
        if not record.of_script:
            lane.step_s.extend(each.wall_s for each in record.steps[-_RECENT:])


def _begun(lane: Lane) -> bool:
    return lane.status != "waiting" or lane.step > 0


def _over(lane: Lane) -> bool:
    return lane.status in ("done", "diverged")


def _share_left(lane: Lane) -> float:
    steps = lane.run.config.steps
    return max(0, steps - lane.step) / steps


def makespan(durations: Sequence[tuple[float, bool]], jobs: int) -> float:
    """Return seconds until the last run ends: each starts, in order, when there is room.

    A duration is (seconds, whether it runs alone).
    """
    free_at = [0.0] * max(1, jobs)
    for seconds, alone in durations:
        if alone:
            free_at = [max(free_at) + seconds] * len(free_at)
        else:
            first = free_at.index(min(free_at))
            free_at[first] += seconds
    return max(free_at)


# Drawing takes time from the runs that share the processor with it.
_REDRAW_S = 1.0
_LINE_S = 15.0
_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "diverged": "✗"}
_STYLES = {"waiting": "dim", "running": "bold", "done": "green", "diverged": "red"}


class LineProgress(Watcher):
    """Writes a line when a run ends, and one now and then in between.

    The board is kept up to date by itself, before this hears of anything.
    """

    def __init__(self, board: Board, console: Console) -> None:
        self._board, self._console, self._next = board, console, time.monotonic() + _LINE_S

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        """A run is over."""
        self._say(_ended_words(run, record))

    def lost(self, run: RunSpec, why: str) -> None:
        """The worker of a run went away."""
        self._say(_lost_words(run, why))

    def paused(self, run: RunSpec) -> None:
        """A run stopped at a checkpoint."""
        lane = self._board.lanes[run.name]
        self._say(f"{run.name} stopped at step {lane.step} of {run.config.steps}: time is up")

    def tick(self) -> None:
        """Say how far the runs are, if that was long ago."""
        if time.monotonic() < self._next:
            return
        running = [lane for lane in self._board.lanes.values() if lane.status == "running"]
        self._say(", ".join(f"{lane.run.name} {_cell_words(lane)}" for lane in running))

    def _say(self, words: str) -> None:
        self._next = time.monotonic() + _LINE_S
        # Not wrapped and not coloured: it is for a file or a pipe.
        self._console.out(visible(f"{_counts(self._board)}: {words}"), highlight=False)


class LiveProgress(Watcher):
    """Keeps a table of arms by seeds on the terminal."""

    def __init__(self, study: Study, board: Board, live: Live) -> None:
        self._study, self._board, self._live, self._next = study, board, live, 0.0

    def lost(self, run: RunSpec, why: str) -> None:
        """The worker of a run went away."""
        self._live.console.print(Text(_lost_words(run, why)), soft_wrap=True)

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
        over = sum(map(_over, lanes))
        if any(map(_begun, lanes)) and over < len(lanes):
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
        over = sum(map(_over, tried))
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
    steps = lane.run.config.steps
    return f"{lane.step}/{steps}{loss}" if lane.step <= steps else f"{lane.step}{loss}"


def _ended_words(run: RunSpec, record: RunRecord) -> str:
    if record.diverged:
        assert record.end is not None
        return f"{run.name} diverged: {record.end.reason}"
    last = record.evaluations[-1] if record.evaluations else None
    if record.starts and record.start.same_as:
        return f"{run.name} is {record.start.same_as}, and takes over its record"
    if last is None:
        return f"{run.name} done"
    found = {"held-out loss": last.loss}
    if record.of_script:
        found = {METRICS[name].unit: value for name, value in last.metrics.items()}
    said = "".join(f", {name} {value:.4f}" for name, value in found.items() if value is not None)
    return f"{run.name} done{said}, {in_words(last.train_wall_s)}" if said else f"{run.name} done"


def _lost_words(run: RunSpec, why: str) -> str:
    return f"{run.name} was lost ({why}) and will be taken up again"


def _counts(board: Board) -> str:
    left = board.left_s()
    time_left = f", {in_words(left)} left" if left and board.done < len(board.lanes) else ""
    return f"{board.done} of {len(board.lanes)} runs{time_left}"


_VERDICT_STYLES = {
    "better": "bold green",
    "worse": "bold red",
    "no difference": "bold cyan",
    "undecided": "yellow",
    "diverged": "bold magenta",
    "incomplete": "dim",
}


def opening(study: Study, folder: Path) -> str:
    """Return the question of each experiment, and the folder of the study."""
    lines = [f"Study {study.name}: {study.question}"]
    lines += [f"  {each.name}: {_experiment(each)}" for each in study.experiments]
    return "\n".join([*lines, f"Folder: {folder}"])


def _experiment(experiment: Experiment) -> str:
    arms = ", ".join(experiment.arm_names[1:])
    seeds = count(len(experiment.seeds), "seed")
    steps = f", {count(experiment.baseline.steps, 'step')}"
    if experiment.baseline.task.name == "script" and experiment.baseline.steps == 1:
        steps = ""  # it was not told how many: own_study says 1
    tried = len([*known_trials(experiment, {}), *expected_trials(experiment, {})])
    swept = " and ".join(experiment.sweep.paths) if experiment.sweep else ""
    sweep = f", after {count(tried, 'trial')} of {swept}" if swept else ""
    stages = "; then the factorial of those that survive" if experiment.combine else ""
    stages += "; then the winner on fresh seeds" if experiment.confirm else ""
    return f"{experiment.baseline_name} against {arms or 'nothing'}; {seeds}{steps}{sweep}{stages}"


def start(
    todo: Sequence[RunSpec], runs: int, jobs: int, threads: int, expected_s: float | None
) -> str:
    """Return a sentence on how much there is to do, and how long it will take."""
    what = f"{len(todo)} of {runs} runs" if len(todo) < runs else count(runs, "run")
    alone = sum(run.alone for run in todo)
    how = f"{jobs} at once" if jobs > 1 and alone < len(todo) else "one at a time"
    if jobs > 1 and alone:
        how += " (those that compare kernels have the machine to themselves)"
    how += f", {count(threads, 'thread')} each"
    duration = "" if expected_s is None else f"Expected duration: about {in_words(expected_s)}. "
    return f"{what} to do, {how}. {duration}Ctrl-C stops; the same command goes on."


def verdicts(verdict: StudyVerdict) -> RenderableType:
    """Return every arm's verdict, a table an experiment."""
    parts: list[RenderableType] = []
    for experiment in verdict.experiments:
        title = f"\n{experiment.experiment}: {experiment.question}"
        parts.append(Text(title, style="bold"))
        parts.append(_arm_rows(experiment))
        lines = [sweep.words for sweep in experiment.sweeps]
        lines += [experiment.follows] if experiment.follows else []
        parts += [Text(f"  {line}") for line in (*lines, *experiment.notes)]
    return Group(*parts, "")


def _arm_rows(experiment: ExperimentVerdict) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for arm in experiment.arms:
        said = (*(flag.words for flag in arm.kernel_flags), arm.speed_withheld, *arm.notes)
        reason = " ".join((arm.reason, *_ratios(arm), *filter(None, said)))
        said_label = f"{arm.label}, not learnt" if arm.neither_learnt else arm.label
        if arm.flagged is not None:
            said_label = "flagged" if arm.flagged else "not seen"
        label = Text(said_label, style=_VERDICT_STYLES[arm.label], no_wrap=True)
        table.add_row(Text(f"  {arm.arm}", no_wrap=True), label, Text(reason))
    for together in experiment.interactions:
        name = Text(f"  {' with '.join(together.arms)}", no_wrap=True)
        table.add_row(name, Text(together.label, no_wrap=True), Text(together.reason))
    for effect in experiment.effects:
        # An arm may have a factor's name: it is against the baseline alone.
        name = Text(f"  effect of {' x '.join(effect.factors)}", no_wrap=True)
        table.add_row(name, Text(effect.label, no_wrap=True), Text(effect.reason))
    return table


def _ratios(arm: ArmVerdict) -> list[str]:
    """Return how much faster and larger than the baseline, e.g. ``Speed x2.41 [x2.30, x2.52].``."""
    speed, measures = arm.speed, arm.measures
    found = {
        "speed": speed.ratio,
        "peak memory": measures.memory_ratio,
        "saved activations": measures.activations_ratio,
    }
    parts = [f"speed withheld ({speed.why})"] if speed.ratio is None and speed.why else []
    for name, ratio in found.items():
        if ratio is not None:
            ends = ratio.interval
            within = f" [x{ends.low:.2f}, x{ends.high:.2f}]" if ends is not None else ""
            why = f" ({speed.why})" if name == "speed" and speed.why else ""
            parts.append(f"{name} x{ratio.value:.2f}{within}{why}")
    text = ", ".join(parts)
    return [f"{text[:1].upper()}{text[1:]}."] if parts else []
