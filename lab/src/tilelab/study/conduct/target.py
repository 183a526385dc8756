"""A target that untrained weights reach already would time nothing: it is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.metrics import METRICS, reached, value_in
from tilelab.study.verdict.text import UNITS
from tilewise.errors import InvalidArgument

__all__ = ["check_target"]


def check_target(study: Study, experiment: str, evaluation: Mapping[str, Any]) -> None:
    """Compare an experiment's target with the held-out loss of the first weights.

    Args:
        study: the config.
        experiment: the name of the run's.
        evaluation: an event of that type; those after the first step say nothing here.

    Raises:
        InvalidArgument: the target is not better than the first weights are.
    """
    found = _of_config(study, experiment)
    if found is None or found.target is None or evaluation["step"]:
        return
    first = value_in(evaluation, found.metric)
    if first is None:
        return
    if not reached(found.metric, first, found.target):
        return
    higher = METRICS[found.metric].higher_is_better
    example = (1 + first) / 2 if higher else 0.6 * first
    raise InvalidArgument(
        f"{experiment}.target",
        f"{found.target:g} {UNITS[found.metric]}",
        f"{'more' if higher else 'less'} than {first:.4g}, the held-out metric of weights that are "
        "not trained yet",
        f"Set it, for example: --set {experiment}.target={example:.3g}",
    )


def _of_config(study: Study, experiment: str) -> Experiment | None:
    """Return the experiment of that name, or the one whose stage it is; None for a stranger."""
    known = {each.name: each for each in study.experiments}
    while experiment and experiment not in known:
        experiment = experiment.rpartition(".")[0]
    return known.get(experiment)
