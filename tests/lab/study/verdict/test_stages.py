"""Stages: who survives, who wins, and that records alone decide it, after any stop."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from tests.lab.study.records_of import Behaviour, config_of, experiment_of, known, study_of, work
from tilelab.study.ask.config import Arm, Combine, Confirm, Experiment, Halving, Study, Sweep
from tilelab.study.plan import Agenda
from tilelab.study.verdict.judge import judge, unfolded

WSD = Arm(name="wsd", changes={"schedule.name": "wsd"})
COSINE = Arm(name="cosine", changes={"schedule.name": "cosine"})
DECAY = Arm(name="decay", changes={"optimizer.weight_decay": 0.5})
DROP = Arm(name="drop", changes={"model.dropout.residual": 0.1})
SMOOTH = Arm(name="smooth", changes={"training.label_smoothing": 0.1})

ALL = (WSD, DROP, SMOOTH)


def staged(*arms: Arm, combine: dict[str, Any] | None = None, **fields: Any) -> Study:
    values: dict[str, Any] = {
        "combine": Combine(seeds=(10, 11, 12), **(combine or {})),
        "confirm": Confirm(seeds=(20, 21, 22)),
        **fields,
    }
    return study_of(experiment_of(*(arms or (WSD, DECAY, DROP, SMOOTH)), **values))


BEHAVIOURS = {
    "wsd": Behaviour(effect=-0.10),
    "drop": Behaviour(effect=-0.05),
    "decay": Behaviour(effect=0.20),
    "smooth": Behaviour(effect=0.001),
    "wsd+drop": Behaviour(effect=-0.20),
}


def stages(study: Study, behaviours: dict[str, Behaviour] | None = None) -> list[Experiment]:
    agenda = work(study, BEHAVIOURS if behaviours is None else behaviours)
    found, verdict = unfolded(study, agenda.records)
    assert verdict.complete
    return [each.planned for each in found]


def test_survivors_are_combined_and_the_winner_runs_again() -> None:
    first, factorial, last = stages(staged())
    assert factorial.name == "optimizers.combine"
    assert known(factorial.design).factors == ("wsd", "drop", "smooth"), (
        "decay was shown to be worse"
    )
    assert len(factorial.arms) == 7
    assert factorial.config_of("wsd+drop").schedule.name == "wsd"
    assert factorial.config_of("wsd+drop").model.dropout.residual == 0.1
    assert [first.seeds, factorial.seeds, last.seeds] == [(0, 1, 2), (10, 11, 12), (20, 21, 22)]
    assert last.arm_names == ("baseline", "wsd+drop")
    assert last.config_of("wsd+drop") == factorial.config_of("wsd+drop")


@pytest.mark.parametrize(
    ("combine", "wsd", "factors"),
    [
        ({"keep": "better"}, Behaviour(effect=-0.1), ("wsd", "drop")),
        ({"most": 2}, Behaviour(effect=-0.1), ("wsd", "drop")),
        ({}, Behaviour(effect=-1, diverged={1: 4}), ("drop", "smooth")),
    ],
)
def test_who_survives(combine: dict[str, Any], wsd: Behaviour, factors: tuple[str, ...]) -> None:
    _, factorial, _ = stages(staged(combine=combine), {**BEHAVIOURS, "wsd": wsd})
    assert known(factorial.design).factors == factors


def test_where_there_are_too_many_combinations_a_fraction_is_run() -> None:
    _, factorial, last = stages(staged(combine={"runs": 4, "most": 3}))
    assert known(factorial.design).generators == {"smooth": ("wsd", "drop")}
    assert [arm.name for arm in factorial.arms] == ["wsd+smooth", "drop+smooth", "wsd+drop"]
    assert last.arm_names[1] == "wsd+drop"
    # The winner may be one that the effects predict and that was not run.
    better = dict.fromkeys(("wsd", "drop", "smooth"), Behaviour(effect=-0.1))
    better |= dict.fromkeys(("wsd+drop", "wsd+smooth", "drop+smooth"), Behaviour(effect=-0.2))
    confirm = Confirm(seeds=(20, 21), winner="predicted")
    last = stages(staged(*ALL, combine={"runs": 4}, confirm=confirm), better)[-1]
    assert last.arm_names == ("baseline", "wsd+drop+smooth")
    assert last.config_of("wsd+drop+smooth").training.label_smoothing == 0.1


def test_of_two_that_change_the_same_value_the_better_goes_on() -> None:
    behaviours = {**BEHAVIOURS, "cosine": Behaviour(effect=-0.15)}
    study = staged(WSD, COSINE, DROP)
    _, factorial, _ = stages(study, behaviours)
    assert known(factorial.design).factors == ("cosine", "drop")
    verdict = judge(study, work(study, behaviours).records)
    assert "Left out, for what a better one changes too: wsd." in verdict.experiments[0].follows


def test_a_single_survivor_goes_straight_to_fresh_seeds() -> None:
    first, last = stages(staged(WSD, DECAY))
    assert last.name == "optimizers.confirm"
    assert last.arm_names == ("baseline", "wsd")
    assert first.name == "optimizers"


def test_where_nothing_is_better_it_ends() -> None:
    study = staged(DECAY, SMOOTH)
    worse = {"decay": Behaviour(effect=0.2), "smooth": Behaviour(effect=0.3)}
    assert len(stages(study, worse)) == 1
    (only,) = judge(study, work(study, worse).records).experiments
    assert "There is nothing to combine." in only.follows
    assert "nothing to confirm" in only.follows


def half(**changes: Any) -> Experiment:
    """wsd, drop and smooth in the half fraction in which each arm has two of them."""
    pairs = {"wsd+drop": (WSD, DROP), "smooth+wsd": (WSD, SMOOTH), "drop+smooth": (DROP, SMOOTH)}
    arms = (
        Arm(name=name, changes={**one.changes, **other.changes, **changes.get(name, {})})
        for name, (one, other) in pairs.items()
    )
    generators = {"smooth": ("wsd", "drop")}
    return experiment_of(
        *arms,
        design={"factors": ("wsd", "drop", "smooth"), "generators": generators, "order": 1},
        confirm=Confirm(seeds=(20, 21), winner="predicted"),
    )


@pytest.mark.parametrize(
    ("effects", "winner"),
    [((-0.1, -0.1, 0.0), "wsd"), ((-0.2, -0.2, -0.2), "wsd+drop+smooth")],
)
def test_a_fraction_tells_what_a_combination_changes_that_is_no_arm(
    effects: tuple[float, ...], winner: str
) -> None:
    names = ("wsd+drop", "smooth+wsd", "drop+smooth")
    known = {name: Behaviour(effect=each) for name, each in zip(names, effects, strict=True)}
    last = stages(study_of(half()), known)[-1]
    assert last.arm_names == ("baseline", winner)
    found = {each.name: last.arms[0].changes.items() >= each.changes.items() for each in ALL}
    assert found == {each.name: each.name in winner.split("+") for each in ALL}


def test_a_winner_is_not_predicted_of_what_nobody_can_tell_apart() -> None:
    with pytest.raises(ValidationError, match="from which it follows what each factor changes"):
        half(**{"drop+smooth": {"optimizer.lr": 0.01}})


@pytest.mark.parametrize(
    "stop",
    [pytest.param(3, marks=pytest.mark.slow), 15, 21, pytest.param(40, marks=pytest.mark.slow)],
)
def test_it_goes_on_after_any_stop_with_the_same_runs(stop: int) -> None:
    study = staged()
    whole = work(study, BEHAVIOURS)
    before = work(study, BEHAVIOURS, most=stop)
    after = work(study, BEHAVIOURS, before.records, order=Random(stop))
    assert after.records == whole.records
    assert len(whole.records) == whole.total == 15 + 24 + 6


def test_more_is_expected_until_it_is_known() -> None:
    study = staged()
    agenda = Agenda(study, {})
    assert agenda.total == 15 + 16 * 3 + 6, "four factors may survive"
    assert not agenda.finished
    # After the last run of the first stage three have.
    assert work(study, BEHAVIOURS, most=15).total == 15 + 24 + 6


def test_every_stage_tunes_and_the_last_keeps_what_was_tuned() -> None:
    sweep = Sweep(multiples=(0.5, 1, 2, 4), seeds=(90,), halving=Halving(rungs=2))
    baseline = config_of(**{"optimizer.lr": 0.001})
    study = staged(WSD, DROP, sweep=sweep, baseline=baseline)
    behaviours = {
        **BEHAVIOURS,
        "optimizers.combine/wsd+drop": Behaviour(effect=-0.2, best=0.004),
        "optimizers.combine/baseline": Behaviour(best=0.0005),
    }
    _, _, last = stages(study, behaviours)
    assert last.sweep is None
    assert last.config_of("wsd+drop").optimizer.options["lr"] == 0.004
    assert last.baseline.optimizer.options["lr"] == 0.0005


def test_a_design_may_be_confirmed_without_a_first_stage() -> None:
    arms = (WSD, DROP, Arm(name="wsd+drop", changes={**WSD.changes, **DROP.changes}))
    study = study_of(
        experiment_of(*arms, design={"factors": ("wsd", "drop")}, confirm=Confirm(seeds=(7, 8)))
    )
    _, last = stages(study)
    assert last.arm_names == ("baseline", "wsd+drop")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"confirm": Confirm(seeds=(10,))}, r"confirm\.seeds"),
        ({"seeds": (9, 10)}, r"combine\.seeds"),
        ({"arms": (Arm(name="sdpa", kind="systems"),)}, "systems arm"),
        ({"arms": (Arm(name="a+b"),)}, r"name has a \+"),
        (
            {"arms": (WSD, DECAY, DROP, SMOOTH), "combine": Combine(seeds=(10,), runs=4)},
            "runs enough for 4 factors",
        ),
        ({"sweep": Sweep(values=dict.fromkeys(("baseline", "wsd"), (0.1,)))}, "multiples"),
        (
            {
                "sweep": Sweep(multiples=(1, 2)),
                "confirm": Confirm(seeds=(20,), winner="predicted"),
            },
            "no tuned value",
        ),
    ],
)
def test_stages_that_could_not_be_run_are_refused(fields: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"arms": (WSD,), "combine": Combine(seeds=(10,)), **fields}
    arms = values.pop("arms")
    with pytest.raises(ValidationError, match=message):
        experiment_of(*arms, **values)
