"""Overrides: where a path leads, how a value is read, and what arms keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.study.records_of import experiment_of, known
from tilelab.study.ask.config import Arm, Experiment, RunConfig, Study, Sweep, config_hash
from tilelab.study.ask.overrides import apply, notes
from tilewise.errors import InvalidArgument

LION = Arm(name="lion", changes={"optimizer": {"name": "lion", "lr": 0.001}})
COSINE = Arm(name="cosine", changes={"schedule.name": "cosine"})
SDPA = Arm(name="sdpa", changes={"attention.implementation": "sdpa"}, kind="systems")


def experiment(name: str, *arms: Arm, **values: Any) -> Experiment:
    return experiment_of(*arms, name=name, baseline=RunConfig(), **values)


SWEEP = Sweep(values=dict.fromkeys(("adamw", "lion", "cosine"), (0.1, 0.2)))
STUDY = Study(
    name="s",
    question="Which?",
    experiments=(
        experiment("kernels", SDPA, baseline_name="plain"),
        experiment("choices", LION, COSINE, baseline_name="adamw", sweep=SWEEP),
        experiment("choices.2", LION, baseline_name="adamw", target=3.0),
    ),
)


def each(study: Study, path: str) -> list[Any]:
    """The value at a path of every experiment."""
    found = []
    for at in study.experiments:
        value: Any = at
        for part in path.split("."):
            value = getattr(value, part)
        found.append(value)
    return found


def test_the_name_of_an_experiment_comes_first_and_the_longest_wins() -> None:
    study = apply(STUDY, ["kernels.budget.steps=5", "choices.budget.steps=6"])
    assert each(study, "baseline.budget.steps") == [5, 6, 300]
    assert each(apply(STUDY, ["choices.2.seeds=4"]), "seeds") == [(0, 1, 2), (0, 1, 2), (4,)]


def test_a_field_of_an_experiment() -> None:
    study = apply(STUDY, ["seeds=5,6", "target=3.5", "smallest_effect=1", "metric=loss"])
    assert each(study, "seeds") == [(5, 6)] * 3
    assert each(study, "target") == [3.5] * 3
    assert each(study, "smallest_effect") == [1.0] * 3
    assert each(study, "metric") == ["loss"] * 3
    assert each(apply(study, ["target=null"]), "target") == [None] * 3
    assert each(apply(STUDY, ["seeds=1", "seeds=2"]), "seeds") == [(2,)] * 3


def test_a_part_of_a_sweep_is_for_the_experiments_that_sweep() -> None:
    study = apply(STUDY, ["sweep.seeds=77,78"])
    assert [at and at.seeds for at in each(study, "sweep")] == [None, (77, 78), None]
    assert each(apply(STUDY, ["sweep=null"]), "sweep") == [None] * 3
    with pytest.raises(InvalidArgument, match="none, it is a value"):
        apply(STUDY, ["kernels.sweep.seeds=3"])


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seeds=7", "seeds", (7,)),
        ("seeds=[7, 8]", "seeds", (7, 8)),
        (" seeds = 7, 8 ", "seeds", (7, 8)),
        ("optimizer.betas=0.5,0.75", "baseline.optimizer.betas", (0.5, 0.75)),
        ("optimizer.betas=[0.5, 0.75]", "baseline.optimizer.betas", (0.5, 0.75)),
        ("training.compile=true", "baseline.training.compile", True),
        ("data.source=123", "baseline.data.source", "123"),
        ("data.source=a,b.txt", "baseline.data.source", "a,b.txt"),
        ('data.source="a b"', "baseline.data.source", "a b"),
        ("data.source=x=y", "baseline.data.source", "x=y"),
        ("optimizer=lion", "baseline.optimizer.name", "lion"),
        ('optimizer={"name": "sgd", "lr": 1}', "baseline.optimizer.lr", 1.0),
        ("optimizer.name=lion", "baseline.optimizer.lr", 0.003),
        ("attention.variant=window", "baseline.attention.variant.size", 256),
        ("question=Why, then?", "question", "Why, then?"),
        ("budget.tokens=64", "baseline.budget.steps", None),
    ],
)
def test_how_a_value_is_read(override: str, path: str, value: object) -> None:
    study = apply(STUDY, ["sweep=null", override])  # a sweep wants options that Lion has
    assert each(study, path) == [value] * 3


def test_some_arms_are_kept_and_experiments_without_any_left_out() -> None:
    study = apply(STUDY, ["arms=lion"])
    assert each(study, "name") == ["choices", "choices.2"]
    assert [[arm.name for arm in at] for at in each(study, "arms")] == [["lion"], ["lion"]]
    sweep = study.experiments[0].sweep
    assert set(known(sweep).values) == {"adamw", "lion"}


def test_some_arms_of_one_experiment() -> None:
    study = apply(STUDY, ["choices.arms=cosine,lion"])
    assert each(study, "name") == each(STUDY, "name")
    assert each(study, "arms") == each(STUDY, "arms")
    assert each(apply(STUDY, ["experiments=choices.2,kernels"]), "name") == ["kernels", "choices.2"]
    assert config_hash(apply(STUDY, [])) == config_hash(STUDY)
    fewer = apply(STUDY, ["choices.arms=cosine"])
    assert each(fewer, "arms") == [(SDPA,), (COSINE,), (LION,)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seeds", r"--set: got 'seeds'; required: path=value"),
        ("=3", r"--set: got '=3'"),
        ("seds=3", "seds: .*Did you mean 'seeds'?"),
        ("optimiser.lr=3", "Did you mean 'optimizer'?"),
        ("kernel.seeds=3", "Did you mean 'kernels.'?"),
        ("kernels=3", "Did you mean 'kernels.'?"),
        ("name=x", "unknown key"),
        ("baseline.optimizer.lr=3", "unknown key"),
        ("kernels.experiments=kernels", "unknown key"),
        ("choices.optimizer.lrr=3", r"Did you mean 'lr'\? \(In experiment 'choices'\.\)"),
        ("training.clp=3", "Did you mean 'clip'?"),
        ("seeds=", r"seeds\.0"),
        ("seeds=a", r"seeds\.0: got 'a'"),
        ("seeds=1,1", r"seeds: got \(1, 1\)"),
        ("choices.seeds=1000", r"sweep\.seeds"),
        ("arms=lino", "arms: got 'lino'.*Did you mean 'lion'?"),
        ("kernels.arms=lion", "some of plain, sdpa"),
        ("arms=", "arms: got ''"),
        ("experiments=kernel", "Did you mean 'kernels'?"),
        ("schedule.floor=0.2", "unknown option"),
    ],
)
def test_what_does_not_fit_is_named(override: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        apply(STUDY, [override])


def test_an_arm_keeps_its_own_change_and_a_note_says_so() -> None:
    overrides = ["optimizer.lr=0.5"]
    study = apply(STUDY, overrides)
    choices = study.experiments[1]
    assert choices.config_of("lion").optimizer.options["lr"] == 0.001
    assert choices.config_of("cosine").optimizer.options["lr"] == 0.5
    assert notes(study, overrides) == [
        "choices/lion keeps its own optimizer.lr: 0.001",
        "choices: the sweep chooses optimizer.lr for every arm",
        "choices.2/lion keeps its own optimizer.lr: 0.001",
    ]


def test_a_note_for_an_option_that_an_arm_has_not() -> None:
    overrides = ["kernels.training.clip=2", "choices.schedule=wsd", "choices.schedule.decay=0.5"]
    study = apply(STUDY, overrides)
    cosine = '{"name": "cosine", "warmup": 0.05, "floor": 0.1, "warmup_steps": 0}'
    assert notes(study, overrides) == [
        f"choices/cosine keeps its own schedule: {cosine}",
        "choices/cosine has no schedule.decay",
    ]
    overrides = ["model.width=64", "seeds=1", "arms=lion"]  # they reach everybody
    assert notes(apply(STUDY, overrides), overrides) == []
