"""Sentences of a study, before it starts and when it has been judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from tilelab.common.durations import in_words
from tilelab.common.terminal import Text
from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.run import RunSpec
from tilelab.study.verdict.result import (
    ArmMeasures,
    ArmVerdict,
    ExperimentVerdict,
    Ratio,
    StudyVerdict,
)
from tilelab.study.verdict.sweeps import expected_trials, known_trials
from tilelab.study.verdict.text import count

__all__ = ["opening", "start", "verdicts"]

_STYLES = {
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
    steps = count(experiment.baseline.steps, "step")
    tried = len([*known_trials(experiment, {}), *expected_trials(experiment, {})])
    sweep = (
        f", after {count(tried, 'trial')} of {experiment.sweep.path}" if experiment.sweep else ""
    )
    stages = "; then the factorial of those that survive" if experiment.combine else ""
    stages += "; then the winner on fresh seeds" if experiment.confirm else ""
    return (
        f"{experiment.baseline_name} against {arms or 'nothing'}; {seeds}, {steps}{sweep}{stages}"
    )


def start(
    todo: Sequence[RunSpec], runs: int, jobs: int, threads: int, expected_s: float | None
) -> str:
    """Return a sentence on how much there is to do, and how long it will take.

    Args:
        todo: what is to be done.
        runs: of the whole study.
        jobs: runs at once.
        threads: of each run.
        expected_s: the forecast; None where there is none.
    """
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
        parts.append(_arms(experiment))
        lines = [sweep.words for sweep in experiment.sweeps]
        lines += [experiment.follows] if experiment.follows else []
        parts += [Text(f"  {line}") for line in (*lines, *experiment.notes)]
    return Group(*parts, "")


def _arms(experiment: ExperimentVerdict) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for arm in experiment.arms:
        reason = " ".join((arm.reason, *_ratios(arm.measures), *_notes(arm)))
        label = Text(arm.label, style=_STYLES[arm.label], no_wrap=True)
        table.add_row(Text(f"  {arm.arm}", no_wrap=True), label, Text(reason))
    for together in experiment.interactions:
        name = Text(f"  {' with '.join(together.arms)}", no_wrap=True)
        table.add_row(name, Text(together.label, no_wrap=True), Text(together.reason))
    for effect in experiment.effects:
        name = Text(f"  {' x '.join(effect.factors)}", no_wrap=True)
        table.add_row(name, Text(effect.label, no_wrap=True), Text(effect.reason))
    return table


def _ratios(measures: ArmMeasures) -> list[str]:
    """Return how much faster and larger than the baseline, e.g. ``Speed x2.41 [x2.30, x2.52].``."""
    found = {
        "speed": measures.speed_ratio,
        "peak memory": measures.memory_ratio,
        "saved activations": measures.activations_ratio,
    }
    parts = [f"{name} {_ratio(ratio)}" for name, ratio in found.items() if ratio is not None]
    text = ", ".join(parts)
    return [f"{text[:1].upper()}{text[1:]}."] if parts else []


def _ratio(ratio: Ratio) -> str:
    interval = ratio.interval
    ends = f" [x{interval.low:.2f}, x{interval.high:.2f}]" if interval is not None else ""
    return f"x{ratio.value:.2f}{ends}"


def _notes(arm: ArmVerdict) -> list[str]:
    flags = [flag.words for flag in arm.kernel_flags]
    return [*flags, *([arm.speed_withheld] if arm.speed_withheld else []), *arm.notes]
