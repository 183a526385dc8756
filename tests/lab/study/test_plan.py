"""Which runs a study has, in which order, and what a sweep chooses.

Runs that are the same are trained once, and their record says so wherever else they stand.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.conduct.conducting import Conducted
from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    record_of,
    records_of,
    study_of,
    work,
)
from tilelab.study import report
from tilelab.study.ask.config import Arm, RunConfig, Study, Sweep, change, config_hash
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.plan import Agenda, planned
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.sweeps import known_trials
from tilewise.errors import InvalidArgument, TilewiseError

RATES = {"baseline": (0.001, 0.002), "lion": (0.0001, 0.0004)}


def swept(**fields: Any) -> Study:
    return study_of(experiment_of("lion", sweep=Sweep(values=RATES, seeds=(90, 91)), **fields))


def names_of(agenda: Agenda) -> list[str]:
    """The names of all runs in the order in which one at a time was done."""
    return [name.partition("/")[2] for name in agenda.records]


def test_seeds_are_outside_and_arms_take_turns_at_being_first() -> None:
    assert known_trials(study_of().experiments[0], {}) == []
    names = names_of(work(study_of()))
    assert names == [
        "baseline/seed-0", "lion/seed-0", "wsd/seed-0",
        "lion/seed-1", "wsd/seed-1", "baseline/seed-1",
        "wsd/seed-2", "baseline/seed-2", "lion/seed-2",
    ]  # fmt: skip


def test_no_arm_counts_before_every_trial_of_its_experiment_has_ended() -> None:
    other = experiment_of("wsd", name="other", seeds=(0,))
    study = Study(name="two", question="?", experiments=(*swept(seeds=(0,)).experiments, other))
    agenda = Agenda(study, {})
    for run in known_trials(study.experiments[0], {})[:-1]:
        agenda.ended(run, record_of(run, Behaviour()))
    left = [run.name for run in agenda.ready()]
    # While the last trial runs, the next experiment may.
    assert left == [
        "optimizers/lion/sweep-0.0004-seed-91",
        "other/baseline/seed-0",
        "other/wsd/seed-0",
    ]


def test_an_arm_whose_candidates_all_diverged_has_no_further_runs() -> None:
    study = swept()
    agenda = Agenda(study, {})
    for run in known_trials(study.experiments[0], {}):
        survives = 0.0 if run.arm == "lion" else 1.0
        agenda.ended(run, record_of(run, Behaviour(survives=survives)))
    assert agenda.total == 8 + 3
    assert {run.arm for run in agenda.ready()} == {"baseline"}
    agenda = work(study, records=agenda.records)
    assert judge(study, agenda.records).experiments[0].arms[0].label == "diverged"


def test_an_experiment_that_compares_kernels_runs_alone() -> None:
    systems = experiment_of(Arm(name="sdpa", kind="systems"), "lion", name="kernels")
    tasks = planned(study_of(systems, experiment_of("wsd")))
    assert {(run.experiment, run.alone) for run in tasks} == {
        ("kernels", True), ("optimizers", False),
    }  # fmt: skip


def test_a_record_of_another_config_is_refused() -> None:
    study = study_of()
    longer = experiment_of("lion", "wsd", baseline=config_of(**{"budget.steps": 50}))
    name = "optimizers/lion/seed-1"
    records = {**records_of(study), name: records_of(study_of(longer))[name]}
    with pytest.raises(TilewiseError, match=f"{name} is of another config"):
        Agenda(study, records).check()
    Agenda(study, records_of(study)).check()


FINAL = RunSpec("optimizers", "lion+wsd", 3, change(RunConfig(), {"optimizer": "lion"}))
TRIAL = RunSpec("optimizers", "lion", 1000, RunConfig(), phase="sweep", candidate=3e-05)


def test_a_name_says_experiment_arm_seed_and_candidate() -> None:
    assert FINAL.name == "optimizers/lion+wsd/seed-3"
    assert TRIAL.name == "optimizers/lion/sweep-3e-05-seed-1000"
    assert TRIAL.folder(Path("studies/x")) == Path("studies/x/runs") / TRIAL.name
    some = RunSpec("e", "a", 0, RunConfig(), phase="sweep", candidate=0.1 + 0.2)
    assert some.name == "e/a/sweep-0.3-seed-0"
    # The hash is of the config alone.
    assert TRIAL.config_hash == config_hash(RunConfig()) != FINAL.config_hash


def test_a_run_comes_back_from_json() -> None:
    given = Execution(folder=Path("x"), cache=Path("y"), device="cuda", threads=4)
    for run in (FINAL, TRIAL, FINAL.executed(given, core=1)):
        values = json.loads(json.dumps(run.as_json()))
        assert RunSpec.from_json(values) == run
        values["config"]["optimizer"]["lr"] = -1
        with pytest.raises(InvalidArgument, match=r"optimizer\.lr: got -1"):
            RunSpec.from_json(values)


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
