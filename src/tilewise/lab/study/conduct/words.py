"""What a study says in sentences, before it starts and when it has been judged."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from tilewise.lab.study.conduct.board import in_words
from tilewise.lab.study.conduct.plan import arm_names, trials
from tilewise.lab.study.config import Experiment, Study
from tilewise.lab.study.data.tokens import Tokens
from tilewise.lab.study.verdict.result import ArmVerdict, StudyVerdict

__all__ = ["STYLES", "corpus", "count", "opening", "start", "verdicts"]

STYLES = {
    "better": "bold green",
    "worse": "bold red",
    "no difference": "bold cyan",
    "undecided": "yellow",
    "diverged": "bold magenta",
    "incomplete": "dim",
}


def opening(study: Study, folder: Path) -> str:
    """What is asked, by experiment, and where it goes."""
    lines = [f"Study {study.name}: {study.question}"]
    lines += [f"  {each.name}: {_experiment(each)}" for each in study.experiments]
    return "\n".join([*lines, f"Folder: {folder}"])


def _experiment(experiment: Experiment) -> str:
    arms = ", ".join(arm_names(experiment)[1:])
    seeds = count(len(experiment.seeds), "seed")
    steps = count(experiment.baseline.steps, "step")
    tried = len(trials(experiment))
    sweep = (
        f", after {count(tried, 'trial')} of {experiment.sweep.path}" if experiment.sweep else ""
    )
    return f"{experiment.baseline_name} against {arms or 'nothing'}; {seeds}, {steps}{sweep}"


def corpus(tokens: Tokens) -> str:
    """What is learnt from."""
    learnt, held_out = len(tokens.train), len(tokens.held_out)
    return f"Text: {tokens.name}, {learnt:,} tokens to learn from, {held_out:,} held out"


def start(open_runs: int, runs: int, jobs: int, threads: int, expected_s: float) -> str:
    """How much there is to do, and how long it will take."""
    what = f"{open_runs} of {runs} runs" if open_runs < runs else count(runs, "run")
    how = f"{jobs} at once, {count(threads, 'thread')} each"
    return (
        f"{what} to do, {how}. Expected duration: about {in_words(expected_s)}. "
        "Ctrl-C stops; the same command goes on."
    )


def verdicts(verdict: StudyVerdict) -> Text:
    """Every arm's verdict, one paragraph an experiment."""
    text = Text()
    for experiment in verdict.experiments:
        text.append(f"\n{experiment.experiment}: {experiment.question}\n", style="bold")
        width = max([0, *(len(arm.arm) for arm in experiment.arms)])
        for arm in experiment.arms:
            text.append(f"  {arm.arm:<{width}}  ")
            text.append(f"{arm.label:<13}", style=STYLES[arm.label])
            text.append(f"  {arm.reason}\n")
            for note in _notes(arm):
                text.append(f"  {'':<{width}}  {'':<13}  {note}\n")
        for together in experiment.interactions:
            text.append(f"  {together.together}: {together.label}; {together.reason}\n")
        for sweep in experiment.sweeps:
            text.append(f"  {sweep.words}\n")
        for note in experiment.notes:
            text.append(f"  {note}\n")
    return text


def _notes(arm: ArmVerdict) -> list[str]:
    flags = [flag.words for flag in arm.kernel_flags]
    return [*flags, *([arm.speed_withheld] if arm.speed_withheld else []), *arm.notes]


def count(number: int, thing: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
