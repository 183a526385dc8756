"""Sweeps: what is chosen, what survived, and the conductor's choice is the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of
from tilelab.study.ask.config import Experiment, Sweep
from tilelab.study.plan import chosen_value
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.result import Interval, SweepResult
from tilelab.study.verdict.sweeps import all_diverged, sweep_results

RATES = (3e-3, 1e-3, 1e-2, 3e-4)


def swept(
    values: tuple[float, ...] = RATES, seeds: tuple[int, ...] = (1000,), **behaviour: Any
) -> tuple[SweepResult, Experiment, dict[str, RunRecord]]:
    sweep = Sweep(values={"baseline": values, "lion": values}, seeds=seeds)
    study = study_of(experiment_of("lion", sweep=sweep))
    records = records_of(study, {"lion": Behaviour(**behaviour)})
    experiment = study.experiments[0]
    results = sweep_results(experiment, records)
    assert [each.arm for each in results] == ["baseline", "lion"]
    return results[1], experiment, records


def test_the_best_mean_is_chosen_and_values_are_in_order() -> None:
    found, experiment, records = swept(best=1e-3)
    assert [each.value for each in found.candidates] == [3e-4, 1e-3, 3e-3, 1e-2]
    assert (found.path, found.chosen, found.at_edge) == ("optimizer.lr", 1e-3, False)
    assert found.survived == Interval(3e-4, 1e-2)
    assert found.chosen == chosen_value(experiment, "lion", records)
    assert found.words == (
        "lion, optimizer.lr: tried 0.0003, 0.001, 0.003, 0.01; 0.001 did best; none diverged."
    )


def test_what_diverged_is_not_chosen_and_bounds_what_survived() -> None:
    found, experiment, records = swept(best=1e-2, survives=2e-3)
    assert found.chosen == 1e-3 == chosen_value(experiment, "lion", records)
    assert found.survived == Interval(3e-4, 1e-3)
    assert [each.status for each in found.candidates] == ["done", "done", "diverged", "diverged"]
    assert "diverged: 0.003, 0.01." in found.words


@pytest.mark.parametrize(("best", "edge"), [(1e-5, 3e-4), (1.0, 1e-2)])
def test_a_choice_at_the_edge_is_said(best: float, edge: float) -> None:
    found, _, _ = swept(best=best)
    assert (found.chosen, found.at_edge) == (edge, True)
    assert found.words.endswith("a better one may lie beyond it.")
    single, _, _ = swept((1e-3,))
    assert not single.at_edge


def test_equal_means_choose_the_smaller_value() -> None:
    found, experiment, records = swept((1e-3, 1e-2, 1e-4), noise=0, best=10**-2.5)
    first, second = found.candidates[1], found.candidates[2]
    assert first.metric == pytest.approx(second.metric)
    for value in (1e-3, 1e-2):  # what the builder rounds is made equal
        name = next(name for name in records if f"lion/sweep-{value:g}-" in name)
        last = records[name].evaluations[-1]
        object.__setattr__(last, "bits_per_byte", 2.0)
    (_, again) = sweep_results(experiment, records)
    assert again.chosen == 1e-3 == chosen_value(experiment, "lion", records)


def test_nothing_is_chosen_before_every_trial_is_over() -> None:
    _, experiment, records = swept()
    del records["optimizers/lion/sweep-0.001-seed-1000"]
    (_, found) = sweep_results(experiment, records)
    assert found.chosen is None
    assert not found.at_edge
    assert found.survived == Interval(3e-4, 1e-2)
    assert "3 of 4 are done" in found.words
    assert sweep_results(experiment, {})[1].survived is None


def test_all_of_them_diverged() -> None:
    found, experiment, records = swept(survives=0)
    assert all_diverged(found)
    assert (found.chosen, found.survived) == (None, None)
    assert chosen_value(experiment, "lion", records) is None
    assert not all_diverged(swept(survives=5e-4)[0])


def test_one_diverged_seed_of_a_value_is_enough() -> None:
    found, experiment, records = swept(seeds=(1000, 1001), best=1e-3)
    lost = records_of(study_of(experiment), {"lion": Behaviour(survives=0)})
    name = "optimizers/lion/sweep-0.001-seed-1001"
    (_, again) = sweep_results(experiment, {**records, name: lost[name]})
    assert found.chosen == 1e-3
    assert again.chosen != 1e-3
    assert again.candidates[1].status == "diverged"


def test_without_a_sweep_there_is_no_result() -> None:
    assert sweep_results(experiment_of("lion"), {}) == ()
