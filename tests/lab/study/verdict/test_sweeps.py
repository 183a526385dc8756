"""Sweeps: what is chosen and what survived; successive halving: who goes on, and its cost."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    record_of,
    records_of,
    study_of,
    work,
)
from tilelab.study.ask.config import Arm, Experiment, Halving, Sweep, change
from tilelab.study.ask.run import trial
from tilelab.study.plan import Agenda, planned
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import Interval, SweepResult
from tilelab.study.verdict.sweeps import (
    all_diverged,
    expected_trials,
    known_trials,
    rungs_of,
    sweep_results,
    tuning_tokens,
)
from tilewise.errors import InvalidArgument

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


@pytest.mark.parametrize(
    ("behaviour", "chosen", "survived", "at_edge", "words"),
    [
        ({"best": 1e-3}, 1e-3, 1e-2, False, "tried 0.0003, 0.001, 0.003, 0.01; 0.001 did best; no"),
        ({"best": 1e-2, "survives": 2e-3}, 1e-3, 1e-3, False, "diverged: 0.003, 0.01."),
        ({"best": 1e-5}, 3e-4, 1e-2, True, "a better one may lie beyond it."),
        ({"best": 1.0}, 1e-2, 1e-2, True, "a better one may lie beyond it."),
    ],
)
def test_the_best_that_survived_is_chosen(
    behaviour: dict[str, Any], chosen: float, survived: float, at_edge: bool, words: str
) -> None:
    found, _, _ = swept(**behaviour)
    assert [each.value for each in found.candidates] == [3e-4, 1e-3, 3e-3, 1e-2]
    assert (found.path, found.chosen, found.at_edge) == ("optimizer.lr", chosen, at_edge)
    assert found.survived == Interval(3e-4, survived)
    assert words in found.words
    lost = [each.status == "diverged" for each in found.candidates]
    assert lost == [each.value > survived for each in found.candidates]
    assert not all_diverged(found)


def test_no_choice_and_no_edge() -> None:
    assert not swept((1e-3,))[0].at_edge
    assert sweep_results(experiment_of("lion"), {}) == ()
    found, _, _ = swept(survives=0)
    assert all_diverged(found)
    assert (found.chosen, found.survived) == (None, None)


def test_equal_means_choose_the_smaller_value() -> None:
    found, experiment, records = swept((1e-3, 1e-2, 1e-4), noise=0, best=10**-2.5)
    first, second = found.candidates[1], found.candidates[2]
    assert first.metric == pytest.approx(second.metric)
    for value in (1e-3, 1e-2):  # what the builder rounds is made equal
        name = next(name for name in records if f"lion/sweep-{value:g}-" in name)
        last = records[name].evaluations[-1]
        object.__setattr__(last, "bits_per_byte", 2.0)
    (_, again) = sweep_results(experiment, records)
    assert again.chosen == 1e-3


def test_nothing_is_chosen_before_every_trial_is_over() -> None:
    _, experiment, records = swept()
    del records["optimizers/lion/sweep-0.001-seed-1000"]
    (_, found) = sweep_results(experiment, records)
    assert found.chosen is None
    assert not found.at_edge
    assert found.survived == Interval(3e-4, 1e-2)
    assert "3 of 4 are done" in found.words
    assert sweep_results(experiment, {})[1].survived is None


def test_one_diverged_seed_of_a_value_is_enough() -> None:
    found, experiment, records = swept(seeds=(1000, 1001), best=1e-3)
    lost = records_of(study_of(experiment), {"lion": Behaviour(survives=0)})
    name = "optimizers/lion/sweep-0.001-seed-1001"
    (_, again) = sweep_results(experiment, {**records, name: lost[name]})
    assert found.chosen == 1e-3
    assert again.chosen != 1e-3
    assert again.candidates[1].status == "diverged"


MULTIPLES = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
LION = Arm(name="lion", changes={"optimizer": {"name": "lion", "lr": 0.0005}})


def experiment(*arms: Arm, halving: Halving | None = None, **fields: Any) -> Experiment:
    sweep = Sweep(multiples=MULTIPLES, halving=halving or Halving(), seeds=(90, 91))
    values: dict[str, Any] = {"baseline": config_of(**{"optimizer.lr": 0.001}), **fields}
    return experiment_of(*(arms or (LION,)), sweep=sweep, **values)


def test_multiples_are_of_every_arms_own_value() -> None:
    found = experiment()
    assert found.candidates("baseline")[:3] == (0.000125, 0.00025, 0.0005)
    assert found.candidates("lion")[-1] == 0.008
    with pytest.raises(ValidationError, match=r"a number in every arm; baseline has .adamw."):
        experiment_of("x", sweep=Sweep(path="optimizer.name", multiples=(1,)))


def test_each_rung_has_half_the_candidates_for_twice_the_steps() -> None:
    study = study_of(experiment(seeds=(0,)))
    agenda = work(study, {"baseline": Behaviour(best=0.001), "lion": Behaviour(best=0.004)})
    rungs = rungs_of(study.experiments[0], "lion", agenda.records)
    assert [(rung.steps, len(rung.runs)) for rung in rungs] == [(10, 8), (20, 4), (40, 2)]
    # The best rate is 0.004: those nearest to it by the log go on.
    assert sorted(rungs[1].runs) == [0.001, 0.002, 0.004, 0.008]
    assert sorted(rungs[2].runs) == [0.002, 0.004]
    names = set(agenda.records)
    assert "optimizers/lion/sweep-0.004-rung-2-seed-91" in names
    assert agenda.records["optimizers/lion/seed-0"].start.config["optimizer"]["lr"] == 0.004
    # Every trial's schedule ends where its rung does.
    steps = {run.config.steps for each in rungs for runs in each.runs.values() for run in runs}
    assert steps == {10, 20, 40}
    halving = Halving(eta=3, rungs=3, longest=0.5)  # a third goes on
    assert [halving.candidates(9, rung) for rung in range(3)] == [9, 3, 1]
    assert [halving.candidates(10, rung) for rung in range(3)] == [10, 4, 2]
    assert [halving.steps(180, rung) for rung in range(3)] == [10, 30, 90]


def test_every_arm_is_tuned_with_the_tokens_that_are_stated() -> None:
    other = Arm(name="wide", changes={"training.batch": 8, "budget.steps": 20})
    study = study_of(experiment(LION, other, seeds=(0,)))
    agenda = work(study)
    # 8 x 10 + 4 x 20 + 2 x 40 steps of 256 tokens, with two seeds: as much as 12 whole runs.
    stated = (8 * 10 + 4 * 20 + 2 * 40) * 256 * 2
    (found,) = judge(study, agenda.records).experiments
    for arm in study.experiments[0].arm_names:
        taken = [
            len(record.steps) * record.start.tokens_per_step
            for record in agenda.records.values()
            if (record.start.arm, record.start.phase) == (arm, "sweep")
        ]
        assert sum(taken) == tuning_tokens(study.experiments[0], arm) == stated
    assert {each.budget_tokens for each in found.sweeps} == {stated}
    assert {each.sweep_tokens for each in (found.baseline.cost, found.arms[0].cost)} == {stated}


def test_trials_are_scored_on_the_text_for_tuning_and_verdicts_are_not() -> None:
    swept = experiment(Arm(name="lion"))
    tuned = change(swept, {"baseline.data.tuning": 0.02})
    tried, judged = trial(tuned, "lion", 0.001, 0, 1000), tuned.config_of("lion")
    assert (tried.config.evaluation.text, judged.evaluation.text) == ("tuning", "held-out")
    assert trial(swept, "lion", 0.001, 0, 1000).config.evaluation.text == "held-out"
    with pytest.raises(InvalidArgument, match=r"evaluation\.text: got tuning"):
        config_of(**{"evaluation.text": "tuning"})


def test_a_rung_waits_for_every_trial_of_its_arm_only() -> None:
    study = study_of(experiment(seeds=(0,)))
    agenda = Agenda(study, {})
    for run in known_trials(study.experiments[0], {}):
        if run.arm == "lion" or run.candidate != 0.001:
            agenda.ended(run, record_of(run, Behaviour()))
    left = agenda.ready()
    assert {run.rung for run in left if run.arm == "lion"} == {1}
    assert {(run.candidate, run.rung) for run in left if run.arm == "baseline"} == {(0.001, 0)}
    assert not agenda.finished


@pytest.mark.parametrize("stop", [5, 33, 50])
def test_it_goes_on_after_any_stop_with_the_same_runs(stop: int) -> None:
    study = study_of(experiment())
    behaviours = {"lion": Behaviour(best=0.003, noise=0.05), "baseline": Behaviour(noise=0.05)}
    whole = work(study, behaviours)
    before = work(study, behaviours, most=stop)
    after = work(study, behaviours, before.records, order=Random(stop))
    assert after.records == whole.records
    assert len(whole.records) == whole.total == 2 * 2 * 14 + 6


def test_what_is_expected_is_as_many_and_as_long_as_what_comes() -> None:
    study = study_of(experiment())
    tasks = planned(study)
    agenda = work(study)
    expected = sorted(run.config.steps for run in tasks)
    assert len({run.name for run in tasks}) == len(tasks)
    assert expected == sorted(record.end.step for record in agenda.records.values() if record.end)
    assert expected_trials(study.experiments[0], agenda.records) == []
    assert Agenda(study, {}).total == agenda.total


def shifted(record: RunRecord, value: float | None) -> RunRecord:
    """The record with that final metric; of None, one that diverged."""
    last = record.evaluations[-1]
    assert record.end is not None
    if value is None:
        record.end = replace(record.end, status="diverged")
    record.evaluations[-1] = replace(last, bits_per_byte=value)
    return record


def chosen(finals: dict[tuple[float, int], float | None], halving: Halving) -> SweepResult:
    """The sweep of the baseline whose trials end so, by candidate and rung."""
    study = study_of(experiment_of(sweep=Sweep(multiples=(1, 2, 4, 8), halving=halving)))
    agenda = Agenda(study, {})
    while (run := agenda.ready()[0]).phase == "sweep":
        value = finals[round((run.candidate or 0) / 0.003), run.rung or 0]
        agenda.ended(run, shifted(record_of(run, Behaviour()), value))
        if agenda.finished:
            break
    return judge(study, agenda.records).experiments[0].sweeps[0]


def test_the_best_of_the_longest_rung_is_chosen_not_of_all() -> None:
    finals: dict[tuple[float, int], float | None] = {
        (1, 0): 2.0, (2, 0): 1.8, (4, 0): 1.5, (8, 0): 3.0,
        (2, 1): 1.4, (4, 1): 1.45,
    }  # fmt: skip
    found = chosen(finals, Halving(rungs=2))
    assert found.chosen == pytest.approx(0.006)
    assert [len(rung.candidates) for rung in found.rungs] == [4, 2]
    assert [each.metric for each in found.candidates] == [2.0, 1.4, 1.45, 3.0]
    assert not found.at_edge


def test_what_diverges_in_a_longer_rung_is_not_chosen_for_a_shorter_one() -> None:
    finals: dict[tuple[float, int], float | None] = {
        (1, 0): 2.0, (2, 0): 1.8, (4, 0): 1.5, (8, 0): None,
        (2, 1): None, (4, 1): None,
    }  # fmt: skip
    found = chosen(finals, Halving(rungs=2))
    assert found.chosen == pytest.approx(0.003), "the best that never diverged"
    assert [each.status for each in found.candidates] == ["done", *["diverged"] * 3]
    found = chosen(dict.fromkeys(((value, 0) for value in (1, 2, 4, 8)), None), Halving())
    assert (found.chosen, len(found.rungs)) == (None, 1), "all at once: nothing more"


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({}, "neither values nor multiples"),
        ({"multiples": (1,), "values": {"lion": (1,)}}, "both values and multiples"),
        ({"multiples": (1, 0)}, "numbers above 0"),
        ({"multiples": (1, 2, 4), "halving": {"rungs": 4}}, r"halving\.rungs: got 4 for 3"),
        ({"multiples": (1, 2, 4, 8), "halving": {"longest": 0.02}}, "more steps than the last"),
        ({"multiples": (1, 1.0000001)}, "six digits"),
        ({"multiples": (1, 2), "halving": {"eta": 1}}, "eta"),
    ],
)
def test_rules_that_do_not_hold_are_refused(sweep: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        experiment_of("lion", sweep=Sweep.model_validate(sweep))


def test_the_mean_over_seeds_decides() -> None:
    study = study_of(experiment(seeds=(0,)))
    agenda = Agenda(study, {})
    for run in known_trials(study.experiments[0], {}):
        # With seed 90 small rates look best, with seed 91 large ones, by more.
        sign = 1 if run.seed == 90 else -3
        value = 5 + sign * math.log10(run.candidate or 1)
        agenda.ended(run, shifted(record_of(run, Behaviour()), value))
    best = rungs_of(study.experiments[0], "baseline", agenda.records)[1].runs
    assert sorted(best) == [0.002, 0.004, 0.008, 0.016]
