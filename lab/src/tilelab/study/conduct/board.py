"""The progress of a study: every run's state, and the time that is left."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilelab.study.ask.run import RunSpec
from tilelab.study.plan import Agenda, Watcher
from tilelab.study.records.events import RunRecord

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
        """Replace the expected runs by those that are known now, those that are over too.

        One that is new is forecast like the others, by its steps.
        """
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
            lane.step = values["from_step"]
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
        self._begun.pop(run.name, None)
        self.lanes[run.name].status = "waiting"

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
