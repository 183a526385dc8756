"""Runs that are the same are trained once, and their record says so wherever else they stand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.conduct.conducting import Conducted
from tests.lab.study.records_of import Behaviour, config_of, experiment_of, study_of, work
from tilelab.study import report
from tilelab.study.ask.config import Arm, Study, Sweep, change
from tilelab.study.plan import Agenda

LION = Arm(name="lion", changes={"optimizer": {"name": "lion", "lr": 0.0005}})


def study(source: str, **fields: Any) -> Study:
    """Two experiments whose baselines, and whose arms ``lion`` and ``same``, are the same."""
    baseline = config_of(**{"data.source": source, "budget.steps": 3})
    given: dict[str, Any] = {"baseline": baseline, "seeds": (0, 1)}
    first = experiment_of(LION, **given)
    second = experiment_of(
        LION.model_copy(update={"name": "same"}), name="again", **{**given, **fields}
    )
    return change(study_of(first, second), {"correction": "experiment"})


@pytest.mark.parametrize("acts", ["quick", "slow"])
def test_runs_that_are_the_same_are_trained_once_even_when_ready_at_once(
    place: Path, acts: str
) -> None:
    conducted = Conducted(place, acts)
    conducted.study = study(str(place / acts))
    for each in ("optimizers/lion/seed-0", "optimizers/baseline/seed-0"):
        (conducted.folder / "runs" / each).mkdir(parents=True)
        (conducted.folder / "runs" / each / "checkpoint.safetensors").write_bytes(b"weights")
    assert conducted.go(jobs=4) == 0
    records = conducted.records
    taken = {name: each.start.same_as for name, each in records.items() if each.start.same_as}
    assert taken == {
        f"again/{arm}/seed-{seed}": f"optimizers/{theirs}/seed-{seed}"
        for arm, theirs in (("baseline", "baseline"), ("same", "lion"))
        for seed in (0, 1)
    }
    same = records["again/same/seed-1"]
    assert (same.start.run, same.start.arm) == ("again/same/seed-1", "same")
    assert same.steps == records["optimizers/lion/seed-1"].steps
    assert "again/same/seed-1 is optimizers/lion/seed-1" in conducted.said
    weights = "checkpoint.safetensors"
    pair = [
        conducted.folder / "runs" / each / weights
        for each in ("again/same/seed-0", taken["again/same/seed-0"])
    ]
    assert os.path.samefile(*pair)
    assert conducted.go() == 0
    assert "All 8 runs are done already." in conducted.said
    text = (conducted.folder / "report.md").read_text()
    assert "runs: 8, 4 of them the same as others" in text
    assert "The runs of same here are those of lion in optimizers (seeds 0 and 1)" in text
    page = report.gather(conducted.folder)
    cpu = sum(step.cpu_s for each in page.records.values() for step in each.steps)
    assert f"CPU time of training: {cpu / 2:.1f} s" in text.replace("\\", "")


def test_what_is_compared_trains_its_own_runs(place: Path) -> None:
    """Arms of one experiment, other seeds, and experiments whose result is a time."""
    kernel = Arm(name="sdpa", changes={"attention.implementation": "sdpa"}, kind="systems")
    experiments = (
        experiment_of("a", "b"),
        experiment_of(kernel, name="kernels"),
        experiment_of("a", name="others", seeds=(7, 8, 9)),
    )
    runs = Agenda(study_of(*experiments), {}).ready()
    assert not [(one.name, other.name) for one in runs for other in runs if one.is_like(other)]


def test_trials_are_the_same_as_trials_and_finals_elsewhere() -> None:
    sweep = Sweep(values={"baseline": (0.001, 0.002), "lion": (0.001, 0.002)}, seeds=(0,))
    plain = config_of(**{"optimizer.lr": 0.001})
    first = experiment_of("lion", name="plain", baseline=plain, seeds=(0, 5))
    second = experiment_of("lion", name="swept", baseline=plain, sweep=sweep, seeds=(1, 5))
    agenda = work(study_of(first, second), {"lion": Behaviour()}, most=4)  # the first experiment
    ready = {run.name: agenda.twin(run) for run in agenda.ready()}
    twin = ready["swept/baseline/sweep-0.001-seed-0"]
    assert twin is not None
    assert twin.name == "plain/baseline/seed-0"
    assert ready["swept/baseline/sweep-0.002-seed-0"] is None
