"""The sentences before a study starts and after it was judged."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of
from tilelab.study.ask.config import Arm, Sweep
from tilelab.study.conduct import words
from tilelab.study.plan import planned
from tilelab.study.verdict.judge import judge

SWEEP = Sweep(values=dict.fromkeys(("baseline", "lion", "wsd", "lion+wsd"), (0.001, 0.002)))


def test_the_opening_says_what_is_compared() -> None:
    study = study_of(experiment_of("lion", "wsd", "lion+wsd", sweep=SWEEP))
    text = words.opening(study, Path("studies/x"))
    assert "baseline against lion, wsd, lion+wsd; 3 seeds, 40 steps" in text
    assert "after 8 trials of optimizer.lr" in text
    assert text.endswith("Folder: studies/x")
    assert "against nothing; 1 seed" in words.opening(study_of(experiment_of(seeds=(0,))), Path())


def test_the_start_says_how_long_it_takes() -> None:
    tasks = planned(study_of())
    assert words.start(tasks, 9, 2, 1, 125.0) == (
        "9 runs to do, 2 at once, 1 thread each. Expected duration: about 2:05 min. "
        "Ctrl-C stops; the same command goes on."
    )
    some = words.start(tasks[:4], 9, 1, 2, 20.0)
    assert some.startswith("4 of 9 runs to do, one at a time, 2 threads each")


def test_the_start_says_what_runs_alone() -> None:
    kernels = experiment_of(Arm(name="sdpa", kind="systems"), name="kernels")
    alone = planned(study_of(kernels))
    assert "one at a time (those that compare" in words.start(alone, 6, 2, 1, 1.0)
    both = [*alone, *planned(study_of())]
    assert "2 at once (those that compare kernels have" in words.start(both, 15, 2, 1, 1.0)
    assert "one at a time, 1 thread" in words.start(both, 15, 1, 1, 1.0)


def test_every_arm_has_its_verdict() -> None:
    study = study_of(experiment_of("lion", "wsd", "lion+wsd", sweep=SWEEP))
    behaviours = {
        "lion": Behaviour(effect=-0.3, kernels=("sdpa math",), pace=2.0, activations=0.5),
        "wsd": Behaviour(diverged={1: 5}),
    }
    to = Console(width=100, file=io.StringIO(), record=True)
    to.print(words.verdicts(judge(study, records_of(study, behaviours))))
    text = to.export_text()
    lines = text.splitlines()
    assert any(line.startswith("  lion  ") and "better" in line for line in lines)
    assert any(line.startswith("  wsd  ") and "diverged" in line for line in lines)
    assert "lion with wsd" in text
    assert "sdpa math" in text  # the kernel flag
    assert "Speed x2.00 [x2.00, x2.00], peak memory x" in " ".join(text.split())
    assert "saved activations x0.50" in " ".join(text.split())
    assert text.count("0.001") >= 4  # what each sweep chose
    assert all(len(line) <= 100 for line in lines)
