"""A target that untrained weights reach is refused; one that nothing reaches is not."""

from __future__ import annotations

import pytest

from tests.lab.study.records_of import experiment_of, study_of
from tilelab.study.conduct.target import check_target
from tilewise.errors import InvalidArgument

FIRST = {"step": 0, "loss": 5.5, "bits_per_byte": 7.9}


def test_a_target_above_the_first_loss_is_refused() -> None:
    study = study_of(experiment_of("lion", target=8.0))
    message = r"optimizers\.target: got 8 bits per byte.*7\.9.*--set optimizers\.target=4\.74"
    with pytest.raises(InvalidArgument, match=message):
        check_target(study, "optimizers", FIRST)
    nats = study_of(experiment_of("lion", target=5.5, metric="loss"))
    with pytest.raises(InvalidArgument, match=r"5\.5 nats per token"):
        check_target(nats, "optimizers", FIRST)


def test_any_other_target_is_let_be() -> None:
    check_target(study_of(experiment_of("lion", target=0.001)), "optimizers", FIRST)
    check_target(study_of(experiment_of("lion", target=6.0)), "optimizers", FIRST)
    check_target(study_of(experiment_of("lion")), "optimizers", FIRST)
    high = study_of(experiment_of("lion", target=8.0))
    check_target(high, "optimizers", {**FIRST, "step": 10})
    check_target(high, "optimizers", {**FIRST, "bits_per_byte": None})
    check_target(high, "put.there.by.hand", FIRST)
