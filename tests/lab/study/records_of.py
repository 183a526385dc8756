"""Synthetic records of a study: arms that behave as told, without training anything.

``study_of()`` makes a small study, ``records_of(study, {"lion": Behaviour(effect=-0.1)})`` the
records that its runs would have left, and ``write(folder, records)`` puts them where runs put
theirs; ``folder_of`` writes the whole folder of a study. ``judged`` is the verdict on such records,
``work`` the agenda after such runs. All of it is a function of its arguments: the same call gives
the same numbers.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tilelab.study.ask.config import (
    Arm,
    Budget,
    Data,
    Evaluation,
    Experiment,
    Model,
    RunConfig,
    Study,
    Training,
    change,
    config_hash,
)
from tilelab.study.ask.run import RECORD, RunSpec, trial
from tilelab.study.plan import Agenda
from tilelab.study.records.events import (
    Checkpoint,
    End,
    Kernels,
    LayerKernel,
    Memory,
    RunRecord,
    Start,
    Step,
    Writer,
)
from tilelab.study.records.events import Evaluation as Evaluated
from tilelab.study.records.store import StoredStudy, begin
from tilelab.study.records.store import folder_of as store_folder
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import ExperimentVerdict

STEP_S = 0.05  # wall seconds of a step of the baseline
START_LOSS = math.log(256)  # nats per token of weights that know nothing
FINAL_LOSS = 1.6  # nats per token of the baseline after the last step, but for its seed
WARMUP_STEPS = 2
COMMAND = "tilewise study run laptop --set 'seeds=0,1,2'"


Value = TypeVar("Value")


def known(value: Value | None) -> Value:
    """The value, which is there."""
    assert value is not None
    return value


@dataclass(frozen=True)
class Behaviour:
    """How the runs of an arm (or of the baseline) come out."""

    effect: float = 0.0  # added to the final metric of every seed, in the experiment's metric
    noise: float = 0.002  # standard deviation of what each run adds of its own, in the same unit
    # Seed -> final metric, in place of all that; for tests by hand.
    finals: Mapping[int, float] = field(default_factory=dict)
    # Seed -> step at which its loss is not finite.
    diverged: Mapping[int, int] = field(default_factory=dict)
    # Seed -> steps that it has come to so far; 0 for a run that has only begun.
    stopped: Mapping[int, int] = field(default_factory=dict)
    absent: Collection[int] = ()  # seeds without a record
    # Of each layer, the last one repeated; a kernel per layer.
    kernels: tuple[str, ...] = ("tilewise cpu",)
    pace: float = 1.0  # steps per second over the standard ones
    activations: float = 1.0  # saved bytes over the standard ones
    twin: bool = False  # ends with the weights of every other run of its seed that has ``twin``
    spikes: Collection[int] = ()  # steps whose loss jumps
    best: float = 1e-3  # value of a sweep at which trials do best
    survives: float = math.inf  # largest value of a sweep that does not diverge
    word_perplexity: bool = False  # whether evaluations have one
    metric: str = ""  # a metric of other tasks that evaluations have, 1 less a tenth of the loss
    starts: tuple[int, ...] = ()  # steps at which processes took the run up again


Behaviours = Mapping[str, Behaviour]


def config_of(**changes: Any) -> RunConfig:
    """A run of 40 steps of 256 tokens each, evaluated every 10; dotted paths change it."""
    config = RunConfig(
        model=Model(layers=2, heads=2, width=32, context=64),
        data=Data(size_cap_bytes=1_000_000),
        training=Training(batch=4),
        budget=Budget(steps=40),
        evaluation=Evaluation(every=10, windows=4),
    )
    return change(config, changes)


def experiment_of(*arms: Arm | str, **fields: Any) -> Experiment:
    """An experiment of these arms (a name alone changes nothing) over three seeds."""
    values: dict[str, Any] = {
        "name": "optimizers",
        "question": "Does another optimizer learn more from the same tokens?",
        "baseline": config_of(),
        "arms": tuple(Arm(name=arm) if isinstance(arm, str) else arm for arm in arms),
        "seeds": (0, 1, 2),
        "smallest_effect": 0.02,
    }
    return Experiment(**{**values, **fields})


def study_of(*experiments: Experiment) -> Study:
    """A study of these experiments; of one with the arms ``lion`` and ``wsd`` without any."""
    return Study(
        name="synthetic",
        question="Which choices are worth having?",
        experiments=experiments or (experiment_of("lion", "wsd"),),
    )


def records_of(study: Study, behaviours: Behaviours | None = None) -> dict[str, RunRecord]:
    """The records of every planned run, by its name.

    Args:
        study: what was planned.
        behaviours: ``"arm"`` or ``"experiment/arm"`` -> how its runs come out; plainly else.
    """
    records = {}
    for experiment in study.experiments:
        for arm in experiment.arm_names:
            behaviour = _behaviour(behaviours, experiment.name, arm)
            for run in _runs(experiment, arm):
                if run.phase == "sweep" or run.seed not in behaviour.absent:
                    records[run.name] = record_of(run, behaviour, experiment.metric)
    return records


def write(folder: Path, records: Mapping[str, RunRecord]) -> None:
    """Write every record into its run's folder below the study's folder."""
    for name, record in records.items():
        place = folder / "runs" / name
        place.mkdir(parents=True, exist_ok=True)
        writer = Writer(place / RECORD)
        events = [*record.starts, *record.evaluations, *record.steps]
        for event in (*events, record.memory, record.kernels, record.sample, record.end):
            if event is not None:
                writer.write(event)
        if record.checkpoint:
            writer.write(Checkpoint(record.checkpoint))
        writer.close()


def folder_of(folder: Path, study: Study, records: Mapping[str, RunRecord], **changes: Any) -> Path:
    """Write a study's folder; ``changes`` are of its ``StoredStudy``."""
    values: dict[str, Any] = {
        "command": COMMAND,
        "environment": {"chip": "a chip", "cores": 2, "versions": {"torch": "2.13.0"}},
        "began": "2026-01-02T03:04:05+00:00",
    }
    begin(folder, StoredStudy(study, **{**values, **changes}))
    write(folder, records)
    return folder


def stored_in(out: Path, study: Study, behaviours: Behaviours | None = None) -> Path:
    """Write a study that has run to where the command looks for it below a folder of studies."""
    return folder_of(store_folder(study, out), study, records_of(study, behaviours))


def judged(experiment: Experiment, behaviours: Behaviours | None = None) -> ExperimentVerdict:
    """The verdict on an experiment whose arms behave so."""
    study = study_of(experiment)
    return judge(study, records_of(study, behaviours)).experiments[0]


def work(
    study: Study,
    behaviours: Behaviours | None = None,
    records: Mapping[str, RunRecord] | None = None,
    most: int | None = None,
    order: random.Random | None = None,
) -> Agenda:
    """The agenda when runs have ended, all of them or ``most``.

    Args:
        study: the config.
        behaviours: as of ``records_of``.
        records: of runs that ended before.
        most: runs to end; None for all.
        order: draws which of the runs that are ready ends next; None for the first.
    """
    left = most
    agenda = Agenda(study, records or {})
    agenda.check()
    metrics = {each.name: each.metric for each in study.experiments}
    while not agenda.finished and left != 0:
        ready = agenda.ready()
        run = order.choice(ready) if order else ready[0]
        metric = metrics.get(run.experiment, "bits_per_byte")
        behaviour = _behaviour(behaviours, run.experiment, run.arm)
        agenda.ended(run, record_of(run, behaviour, metric))
        left = None if left is None else left - 1
    return agenda


def _behaviour(known: Behaviours | None, experiment: str, arm: str) -> Behaviour:
    known = known or {}
    return known.get(f"{experiment}/{arm}", known.get(arm, Behaviour()))


def record_of(run: RunSpec, behaviour: Behaviour, metric: str = "bits_per_byte") -> RunRecord:
    """The record of one run that behaves so."""
    config = run.config
    diverged = behaviour.diverged.get(run.seed) if run.phase == "final" else None
    if run.phase == "sweep" and (run.candidate or 0.0) > behaviour.survives:
        diverged = 3
    taken = min(behaviour.stopped.get(run.seed, config.steps), diverged or config.steps)
    record = RunRecord(starts=[_start(run, step) for step in (0, *behaviour.starts)])
    step_s = STEP_S / behaviour.pace
    final = _final_loss(run, behaviour, metric)
    noise = random.Random(f"batches {run.seed}")
    for step in range(taken + 1):
        loss = final + (START_LOSS - final) * math.exp(-6 * step / config.steps)
        if step == config.steps:
            loss = final
        lost = step == diverged
        if step:
            jump = 3.0 if step in behaviour.spikes else 0.0
            batch_loss = None if lost else loss + noise.gauss(0, 0.02) + jump
            record.steps.append(_step(step, batch_loss, config, step_s))
        if not lost and (step in (0, config.steps) or step % config.evaluation.every == 0):
            record.evaluations.append(_evaluated(step, loss, config, step_s, behaviour))
    if taken >= min(2, config.steps):
        record.memory = _memory(behaviour.activations)
        record.kernels = _kernels(behaviour, config, taken)
        record.checkpoint = taken
    if diverged is not None or taken == config.steps:
        record.end = _end(run, taken, behaviour.twin, diverged is not None)
    return record


def _runs(experiment: Experiment, arm: str) -> list[RunSpec]:
    config, sweep = experiment.config_of(arm), experiment.sweep
    values = [(value, seed) for value in sweep.values[arm] for seed in sweep.seeds] if sweep else []
    trials = [trial(experiment, arm, value, 0, seed) for value, seed in values]
    return [*trials, *(RunSpec(experiment.name, arm, seed, config) for seed in experiment.seeds)]


def _final_loss(run: RunSpec, behaviour: Behaviour, metric: str) -> float:
    """Nats per token; a token of the tests is a byte, so that the metrics differ by log 2 alone."""
    unit = math.log(2) if metric == "bits_per_byte" else 1.0
    if run.phase == "final" and run.seed in behaviour.finals:
        return behaviour.finals[run.seed] * unit
    # Seeds differ more than arms do with one seed: that is what pairing takes out.
    shared = random.Random(f"seed {run.seed}").gauss(0, 0.05)
    own = random.Random(f"{run.experiment} {run.arm} {run.seed}").gauss(0, behaviour.noise)
    if behaviour.twin:
        own = 0.0
    loss = FINAL_LOSS + (shared + own + behaviour.effect) * unit
    if run.candidate is not None:
        loss += 0.2 * math.log10(run.candidate / behaviour.best) ** 2
    return loss


def _start(run: RunSpec, from_step: int) -> Start:
    model = run.config.model
    weights = 12 * model.layers * model.width**2 + 256 * model.width
    full = 12.0 * model.layers * model.width * model.context
    return Start(
        run=run.name,
        experiment=run.experiment,
        arm=run.arm,
        seed=run.seed,
        phase=run.phase,
        candidate=run.candidate,
        config=run.config.model_dump(mode="json"),
        config_hash=config_hash(run.config),
        from_step=from_step,
        time="2026-01-02T03:04:05+00:00",
        environment={"python": "3.11.2", "torch": "2.13.0", "chip": "test chip", "threads": 1},
        corpus={
            "name": "stdlib",
            "sha256": "0" * 64,
            "train_tokens": 950_000,
            "held_out_tokens": 50_000,
            "train_bytes": 950_000,
            "held_out_bytes": 50_000,
        },
        parameters={
            "total": weights + model.context * model.width,
            "embedding": model.context * model.width,
        },
        groups={"decay": ["h.0.attn.c_attn.weight"], "no decay": ["h.0.ln_1.weight"]},
        flops_per_token={"full": 6.0 * weights + full, "causal": 6.0 * weights + full / 2},
        peak_flops_s=5e10,
    )


def _step(step: int, loss: float | None, config: RunConfig, step_s: float) -> Step:
    return Step(
        step=step,
        loss=loss,
        lr=1e-3 * (1 - step / config.steps),
        gradient_norm=None if loss is None else 1.0 + 1.0 / step,
        wall_s=step_s * (4 if step <= WARMUP_STEPS else 1),
        cpu_s=step_s * (4 if step <= WARMUP_STEPS else 1) * 0.9,
        warmup=step <= WARMUP_STEPS,
    )


def _evaluated(
    step: int, loss: float, config: RunConfig, step_s: float, behaviour: Behaviour
) -> Evaluated:
    wall_s = step_s * (step + 3 * min(step, WARMUP_STEPS))
    return Evaluated(
        step=step,
        tokens=step * config.tokens_per_step,
        train_wall_s=wall_s,
        train_cpu_s=wall_s * 0.9,
        loss=loss,
        bits_per_byte=loss / math.log(2),
        word_perplexity=math.exp(loss * 4) if behaviour.word_perplexity else None,
        wall_s=0.02,
        metrics={behaviour.metric: 1 - loss / 10} if behaviour.metric else {},
    )


def _memory(activations: float) -> Memory:
    weights, saved = 400_000, round(3_000_000 * activations)
    return Memory(weights, weights, 2 * weights, saved, 4 * weights + saved + 500_000)


def _kernels(behaviour: Behaviour, config: RunConfig, taken: int) -> Kernels:
    names = behaviour.kernels
    calls = taken * config.training.accumulation
    layers = range(config.model.layers)
    return Kernels([LayerKernel(at, names[min(at, len(names) - 1)], calls) for at in layers])


def _end(run: RunSpec, step: int, twin: bool, diverged: bool) -> End:
    who = f"{run.experiment} {run.seed}" if twin else run.name
    digest = hashlib.sha256(who.encode()).hexdigest()
    if diverged:
        return End("diverged", step, f"the loss of step {step} is not finite", digest, digest)
    return End("done", step, "", digest, digest)
