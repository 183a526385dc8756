"""Searches: values of several paths, asked for one after the other."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.conduct.conducting import conductor_of
from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    folder_of,
    record_of,
    study_of,
    work,
)
from tilelab.study.ask.config import Arm, Experiment, Ladder, Search, Study, Sweep, parse
from tilelab.study.conduct.conductor import Conductor
from tilelab.study.plan import Agenda
from tilelab.study.report import gather, write
from tilelab.study.verdict import sweeps
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.sweeps import sweep_results
from tilewise.errors import InvalidArgument

SPACE: dict[str, Any] = {
    "optimizer.lr": ("times", 0.1, 10),
    "optimizer.weight_decay": ("linear", 0, 0.5),
}
OWN = {"optimizer.lr": 0.001}
MUON = Arm(name="fast", changes={"optimizer.lr": 0.01})
asked: list[tuple[int, int]] = []  # number of a trial, and how many before it were told


def searched(trials: int = 6, **fields: Any) -> Study:
    sweep = Sweep(search=Search(space=SPACE, trials=trials), **fields)
    return study_of(experiment_of(MUON, baseline=config_of(**OWN), sweep=sweep, seeds=(0, 1)))


def drawn(ranges: Any, told: Any, seed: int, number: int) -> tuple[float, ...]:
    """Stands in for Optuna: values that follow from the same things."""
    asked.append((number, len(told)))
    rng = random.Random(f"{told} {seed} {number}")
    return tuple(float(f"{rng.uniform(low, high):.6g}") for _, (low, high, _) in ranges)


@pytest.fixture
def without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr(sweeps, "_ask", drawn)
    monkeypatch.setattr(sweeps, "there", lambda: True)


def values_of(agenda: Agenda) -> dict[str, tuple[float, float]]:
    return {
        run.name: (run.config.optimizer.options["lr"], run.config.optimizer.options["weight_decay"])
        for run in agenda.runs
    }


@pytest.mark.usefixtures("without_optuna")
def test_trials_follow_from_those_before_them_and_the_best_one_counts(tmp_path: Path) -> None:
    study = searched()
    experiment = study.experiments[0]
    agenda = Agenda(study, {})
    ready = [run.name for run in agenda.ready()]
    assert sorted(ready) == sorted(
        f"optimizers/{arm}/sweep-{number}-seed-1000"
        for arm in ("baseline", "fast")
        for number in (1, 2, 3)
    ), "those that are drawn at random may all begin"
    assert agenda.total == 2 * 6 + 2 * 2
    agenda = work(study)
    assert dict(asked) == {1: 0, 2: 0, 3: 0, 4: 3, 5: 4, 6: 5}
    values = values_of(agenda)
    for result in sweep_results(experiment, agenda.records):
        assert len(result.candidates) == 6
        best = min(result.candidates, key=lambda each: each.metric or math.inf)
        assert result.chosen == best.value
        chosen = values[f"optimizers/{result.arm}/sweep-{best.value:g}-seed-1000"]
        assert tuple(best.point.values()) == chosen
        assert values[f"optimizers/{result.arm}/seed-0"] == chosen
        assert f"number {best.value:g} did best, with optimizer.lr {chosen[0]:g}, " in result.words
        assert result.path == "trials of optimizer.lr and optimizer.weight_decay"
        assert not result.at_edge
        assert result.budget_tokens == 6 * 40 * 256
        own = 0.01 if result.arm == "fast" else 0.001
        assert all(own / 10 <= each.point["optimizer.lr"] <= own * 10 for each in result.candidates)
    arm = judge(study, agenda.records).experiments[0].arms[0]
    assert (arm.cost.sweep_runs, arm.cost.sweep_tokens) == (6, 6 * 40 * 256)
    _, twin = write(gather(folder_of(tmp_path, study, agenda.records)))
    assert "by its search" in twin.read_text()


@pytest.mark.usefixtures("without_optuna")
def test_it_goes_on_from_its_records_and_asks_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    study = searched()
    whole = values_of(work(study))
    for most in (1, 5, 8, 11):
        part = work(study, most=most)
        asked.clear()
        again = work(study, records=part.records)
        assert values_of(again) == whole
    # Everything is read without asking; what is missing is not, where nobody can be asked.
    done = work(study).records
    monkeypatch.setattr(sweeps, "_ask", lambda *_: pytest.fail("it was asked"))
    assert values_of(Agenda(study, done)) == whole
    monkeypatch.setattr(sweeps, "there", lambda: False)
    part = work(study, records=part.records, most=0)
    assert part.total == len(whole)
    assert not judge(study, part.records).complete


@pytest.mark.usefixtures("without_optuna")
def test_a_trial_that_diverged_is_as_bad_as_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def remember(ranges: Any, seen: Any, seed: int, number: int) -> tuple[float, ...]:
        told.append(seen)
        return drawn(ranges, seen, seed, number)

    monkeypatch.setattr(sweeps, "_ask", remember)
    study = searched(trials=4)
    agenda = Agenda(study, {})
    for run in agenda.ready():
        lost = Behaviour(survives=0.0 if run.candidate == 2 else math.inf)
        agenda.ended(run, record_of(run, lost))
    ranks = [rank for _, rank in told[-1]]
    assert len(ranks) == 3
    assert ranks[1] == max(ranks[0], ranks[2])


def refused(**sweep: Any) -> Experiment:
    fields = {key: sweep.pop(key) for key in ("ladder", "confirm") if key in sweep}
    return experiment_of(sweep=Sweep(**sweep), **fields)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"multiples": (1, 2)}, "sweep.search"),
        ({"space": {"optimizer.lr": ("log", 0.1, 0.01)}}, "the lower end first"),
        ({"space": {"optimizer.lr": ("log", 0, 0.01)}}, "above 0 unless linear"),
        ({"space": {"optimizer.speed": ("log", 0.1, 1)}}, "speed"),
        ({"space": {"optimizer.name": ("times", 0.1, 1)}}, "a number in every arm"),
        ({"ladder": Ladder(rungs={"a": {}, "b": {}}, tuned=("a",))}, "candidates of one path"),
        ({"confirm": {"seeds": (7,)}}, "later stages"),
    ],
)
def test_what_a_search_cannot_do_is_refused(sweep: dict[str, Any], words: str) -> None:
    space = sweep.pop("space", SPACE)
    with pytest.raises(ValueError, match=words):
        refused(**{**sweep, "search": Search(space=space, trials=4)})


def test_a_study_without_optuna_is_refused_before_its_first_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if name == "optuna":
            raise ImportError("No module named 'optuna'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    ours: Conductor = conductor_of(searched(), tmp_path / "out")
    with pytest.raises(InvalidArgument, match=r"sweep.search.*pip install 'tilewise\[search\]'"):
        sweeps.check_search(ours.study)
    with pytest.raises(InvalidArgument, match="optuna"):
        ours.conduct(None)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_optuna_finds_the_bottom_of_a_bowl() -> None:
    pytest.importorskip("optuna")
    ranges = (("x", (1e-4, 1.0, True)), ("y", (-1.0, 1.0, False)))

    def search(trials: int) -> list[tuple[tuple[float, ...], float]]:
        told: list[tuple[tuple[float, ...], float]] = []
        for number in range(1, trials + 1):
            x, y = sweeps._ask(ranges, tuple(told) if number > 5 else (), 0, number)
            assert 1e-4 <= x <= 1.0
            told.append(((x, y), (math.log10(x) + 2) ** 2 + (y - 0.3) ** 2))
        return told

    found = search(16)
    assert min(value for _, value in found[5:]) < 0.05 < min(value for _, value in found[:5])
    sweeps._ask.cache_clear()
    assert search(16) == found


def test_a_search_is_stored_and_other_sweeps_hash_as_before() -> None:
    study = searched()
    assert parse(Study, study.model_dump(mode="json")) == study
    plain = Sweep(multiples=(1, 2))
    assert "search" not in experiment_of(sweep=plain).model_dump(exclude_defaults=True)["sweep"]
