"""The work of a process for a run: take it up where it was left, and write down what happens.

Where several processes train a run together, all of them do this, and only the lead writes.

The order of writing makes a crash harmless. The results of a step or an evaluation are in the
record before the checkpoint that has the step behind it, so a record is never behind a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tilelab.study.ask.run import RECORD
from tilelab.study.choices import optimizers
from tilelab.study.records import events
from tilelab.study.tasks.task import Held, Prepared
from tilelab.study.train import state as states
from tilelab.study.train.costs import PeakMeter, per_token
from tilelab.study.train.state import State, Trunk
from tilelab.study.train.trainer import Diverged, Trainer

WARMUP_STEPS = 2  # first steps of a process: caches, compilation, optimizer state
# A checkpoint waits for this many times what the last one took: it costs a few percent at most.
_CHECKPOINT_SHARE = 20.0


@dataclass
class Totals:
    """Counts over all processes of a run; in the checkpoint, but not in its hash."""

    train_wall_s: float = 0.0  # in optimizer steps
    train_cpu_s: float = 0.0
    tokens: int = 0  # learnt from
    peak_bytes: int = 0  # most memory while training
    kernels: list[list[Any]] = field(default_factory=list)  # the guard's counts


class Session:
    """Works on a run until it is over.

    No other process works in its folder, which exists. The meter was made before the trainer.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Prepared,
        folder: Path,
        meter: PeakMeter,
        *,
        peak_flops_s: float,
        checkpoint_every_s: float = 10.0,
        environment: dict[str, Any] | None = None,
    ) -> None:
        self.trainer, self.meter, self.totals = trainer, meter, Totals()
        self._team = trainer.team
        self._examination = trainer.task.examination(trainer.config, data)
        self._data = data
        self._record, self._checkpoint = folder / RECORD, folder / states.CHECKPOINT
        self._every_s, self._environment = checkpoint_every_s, environment or {}
        self._peak_flops_s = peak_flops_s
        self._first_weights = states.weights_sha256(trainer.model)
        self._split: events.Memory | None = None
        self._taken = 0  # steps of this session
        self._next_checkpoint = 0.0

    def work(self) -> None:
        """Train to the end of the budget, until a number is not finite, or until time is up.

        When time is up there is a checkpoint, and the record has no end.

        Raises:
            CheckpointError: the checkpoint is not of this run, or damaged.
            CorruptRecordError: the record was changed.
            OSError: something cannot be written; what was written before stays.
        """
        record = events.RunRecord.read(self._record) if self._team.lead else events.RunRecord()
        done, begun = self._team.agreed((record.done, bool(record.starts)))
        if done:
            return
        common = None
        if begun:  # a checkpoint whose record is gone says nothing of how it came about
            self._resume(record)
        elif self._branches:
            common = states.find_trunk(self.trainer.run, self.trainer.identity)
        self._writer = events.Writer(self._record) if self._team.lead else None
        try:
            if common is not None:
                self._go_on_from(common)
            else:
                self._write(self._start())
            self._put_off_checkpoint(0.0)
            try:
                if not self._train():
                    return
            except Diverged as diverged:
                self._write(self.trainer.guard.kernels())
                self._write_last("diverged", str(diverged))
            else:
                if self.trainer.config.evaluation.sample_tokens:
                    self._write(self._sample())
                self._write_last("done", "")
        finally:
            if self._writer is not None:
                self._writer.close()

    @property
    def _branches(self) -> bool:
        return self.trainer.run.branches and self._team.size == 1

    def _go_on_from(self, common: Trunk) -> None:
        """Take over the steps that another run of the study has taken already."""
        self._restore(common.state)
        self._write(replace(self._start(), shared_steps=self.trainer.done))
        for event in (*common.steps, *common.evaluations):
            self._write(event)
        self._save()

    def held_out(self, whole: bool) -> Held:
        """Return the loss and the metrics now, without a trace; ``whole`` after the last step."""
        with self._shown() as autocast:
            return self._examination.held_out(self.trainer.model, whole, autocast)

    def _sample(self) -> events.Sample:
        """Return a text that the model writes; arms draw the same random numbers."""
        run, count = self.trainer.run, self.trainer.config.evaluation.sample_tokens
        with self._shown() as autocast:
            return self._examination.sample(self.trainer.model, count, run.seed, autocast)

    @contextmanager
    def _shown(self) -> Iterator[torch.dtype | None]:
        """Let an optimizer that averages show its average; gives the dtype of autocast."""
        dtype = self.trainer.dtype
        optimizers.evaluation_mode(self.trainer.optimizer)
        try:
            yield None if dtype == torch.float32 else dtype
        finally:
            optimizers.training_mode(self.trainer.optimizer)

    def _write(self, event: events.Event) -> None:
        """Write down an event; the lead does it for all processes."""
        if self._writer is not None:
            self._writer.write(event)

    def _resume(self, record: events.RunRecord) -> None:
        """Go on from the checkpoint, unless the record lost steps that it has behind it."""
        self.meter.pause()
        state = states.read(self._checkpoint, self.trainer.identity)
        known = self._team.agreed(record.whole_steps)
        if state is not None and state.step <= known and state.values:  # without: of a run's end
            self._restore(state)
        del state
        self.meter.resume()

    def _restore(self, state: State) -> None:
        self.trainer.restore(state)
        whole = state.step * self.trainer.config.tokens_per_step
        self.totals = Totals(**{"tokens": whole, **state.totals})  # old ones do not count them
        self.trainer.guard.restore(self.totals.kernels)

    def _train(self) -> bool:
        """Take steps; return whether all are done, or False when time is up before that."""
        trainer, every = self.trainer, self.trainer.config.evaluation.every
        branch = states.branch_step(trainer.config) if self._branches else 0
        if trainer.done == 0:
            self._evaluate()
        while not trainer.over and not self._time_is_up():
            self._step()
            if self._taken == WARMUP_STEPS:
                self._measure()
            if trainer.over or trainer.done % every == 0:
                self._evaluate()
            if trainer.done == branch:
                self._leave()
            due = not trainer.over and time.monotonic() >= self._next_checkpoint
            if self._team.agreed(due):
                self._save()
        if self._taken:
            self._measure()
            self._save()
        return trainer.over

    def _time_is_up(self) -> bool:
        run = self.trainer.run
        return run.execution.until is not None and self._team.agreed(run.time_is_up)

    def _step(self) -> None:
        taken = self.trainer.step()
        self._taken += 1
        self.totals.train_wall_s += taken.wall_s
        self.totals.train_cpu_s += taken.cpu_s
        self.totals.tokens += taken.tokens
        self._write(events.Step(**taken._asdict(), warmup=self._taken <= WARMUP_STEPS))

    def _evaluate(self) -> None:
        """Evaluate the weights; not finite is diverged, for there may be no step to notice it."""
        self.meter.pause()
        begin = time.perf_counter()
        found, on_windows = self.held_out(whole=self.trainer.over), dict[str, float | None]()
        if self.trainer.over and self.trainer.config.evaluation.final_stride:
            same = self.held_out(whole=False)
            on_windows = {"loss": same.loss, "bits_per_byte": same.bits_per_byte}
        self._write(
            events.Evaluation(
                step=self.trainer.done,
                tokens=self.totals.tokens,
                train_wall_s=self.totals.train_wall_s,
                train_cpu_s=self.totals.train_cpu_s,
                **found._asdict(),
                on_windows=on_windows,
                wall_s=time.perf_counter() - begin,
            )
        )
        self.meter.resume()
        if not math.isfinite(found.loss):
            raise Diverged(f"the held-out loss after step {self.trainer.done} is {found.loss}")

    def _measure(self) -> None:
        self.meter.pause()
        self.totals.peak_bytes = max(self.totals.peak_bytes, self.meter.peak_bytes())
        if self._split is None:
            self._split = self.trainer.split()
        self._write(replace(self._split, peak_bytes=self.totals.peak_bytes))
        self._write(self.trainer.guard.kernels())
        self.meter.resume()

    def _save(self) -> None:
        self.meter.pause()
        begin = time.monotonic()
        if self._writer is not None:
            self._writer.sync()
        self.totals.peak_bytes = max(self.totals.peak_bytes, self.meter.peak_bytes())
        self.totals.kernels = self.trainer.guard.as_json()
        state = self.trainer.state(vars(self.totals))
        if self._team.lead:
            states.write(state, self._checkpoint)
        del state
        self._write(events.Checkpoint(self.trainer.done))
        self._put_off_checkpoint(time.monotonic() - begin)
        self.meter.resume()

    def _leave(self) -> None:
        """Put down the state for longer runs of the study, whose first steps are these."""
        self.meter.pause()
        self.totals.kernels = self.trainer.guard.as_json()
        states.leave_trunk(self.trainer.run, self.trainer.state(vars(self.totals)))
        self.meter.resume()

    def _put_off_checkpoint(self, took_s: float) -> None:
        wait_s = max(self._every_s, _CHECKPOINT_SHARE * took_s) if self._every_s else 0.0
        self._next_checkpoint = time.monotonic() + wait_s

    def _start(self) -> events.Start:
        trainer = self.trainer
        attended = trainer.task.attended(trainer.config, self._data)
        flops = per_token(trainer.config, trainer.parameters, attended)
        return events.Start(
            **trainer.run.facts,
            from_step=trainer.done,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            environment=self._environment,
            corpus=self._data.as_json(),
            parameters=trainer.parameters,
            groups=trainer.groups,
            flops_per_token=flops if trainer.task.causal else {"full": flops["full"]},
            peak_flops_s=self._peak_flops_s,
            weights_sha256=self._first_weights,
        )

    def _write_last(self, status: Any, reason: str) -> None:
        """Say that the run is over; one that is done keeps no more than an export needs.

        A diverged run leaves its checkpoint as it is: one of now would lie ahead.
        """
        weights = states.weights_sha256(self.trainer.model)
        if self._team.agreed(weights) != weights:
            raise RuntimeError("the weights of the run's processes are not the same any more")
        state = self.trainer.state(vars(self.totals))
        self._write(
            events.End(
                status=status,
                step=self.trainer.done,
                reason=reason,
                weights_sha256=weights,
                state_sha256=state.sha256,
            )
        )
        if status == "done" and self._writer is not None:
            self._writer.sync()  # before the state that a run without its end would go on from
            states.write(self.trainer.last(state), self._checkpoint)
