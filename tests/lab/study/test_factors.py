"""Factors that a task or a model does not know are refused, and never without an effect."""

from __future__ import annotations

from typing import Any

import pytest

from tilelab.study.ask.config import RunConfig, change
from tilelab.study.tasks.language import LanguageModelling
from tilewise.errors import InvalidArgument


class Ignorant(LanguageModelling):
    """A task that knows neither documents nor rows that grow."""

    packs = False


@pytest.mark.parametrize(
    "changes",
    [
        {"data.packing": "documents"},
        {"data.packing": "padded"},
        {"evaluation.documents": True},
        {"training.length_warmup.steps": 10},
    ],
    ids=str,
)
def test_rows_that_a_task_does_not_know(changes: dict[str, Any]) -> None:
    config = change(RunConfig(), changes)
    LanguageModelling().check(config)
    (path,) = changes
    with pytest.raises(InvalidArgument, match=f"{path}: got .*for task language-modelling"):
        Ignorant().check(config)
    Ignorant().check(RunConfig())


@pytest.mark.parametrize(
    "changes",
    [
        {"model.kv_heads": 1},
        {"model.positions": "rotary"},
        {"model.norm": "rms"},
        {"model.qk_norm": True},
    ],
    ids=str,
)
def test_numbers_of_the_gpt2_alone(changes: dict[str, Any]) -> None:
    class Encoder(LanguageModelling):
        families = ("gpt2", "bert")  # type: ignore[assignment]

    config = change(RunConfig(), changes)
    Encoder().check(config)
    other = config.model.model_copy(update={"family": "bert"})
    (path,) = changes
    with pytest.raises(InvalidArgument, match=f"{path}: got .*for family bert"):
        Encoder().check(config.model_copy(update={"model": other}))
