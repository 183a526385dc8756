"""The values that a search tries: from the records, or asked of Optuna.

The values of a trial are those of its record. One that has none follows from the seed, its number
and the trials of its arm before it; so a search goes on from its records alone, and a study is read
without Optuna. A trial that diverged counts as the worst of those that did not.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.metrics import rank
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.result import Candidate
from tilewise.errors import InvalidArgument

_DIGITS = 6  # of a value that is asked for

_Ranges = tuple[tuple[str, tuple[float, float, bool]], ...]
_Told = tuple[tuple[tuple[float, ...], float], ...]  # values in the order of the paths, and a rank


def recorded(
    experiment: Experiment, arm: str, record: RunRecord | None
) -> Mapping[str, float] | None:
    """Return the values of a trial that has begun; None of others."""
    if record is None or not record.starts:
        return None
    found = {}
    for path in experiment.ranges(arm):
        value: Any = record.start.config
        for part in path.split("."):
            value = value[part]
        found[path] = float(value)
    return found


def asked(
    experiment: Experiment,
    arm: str,
    number: int,
    points: Mapping[float, Mapping[str, float]],
    told: Sequence[Candidate],
) -> Mapping[str, float]:
    """Return the values of a trial, given what became of those before it.

    Args:
        experiment: with a search.
        arm: of the trial.
        number: of the trial, from 1.
        points: number -> values of the trials before it.
        told: what became of them; empty for one that is drawn at random.

    Raises:
        InvalidArgument: Optuna is not installed.
    """
    search = experiment.sweep.search if experiment.sweep else None
    assert search is not None
    ranges = experiment.ranges(arm)
    ranks = [None if each.metric is None else rank(experiment.metric, each.metric) for each in told]
    worst = max((each for each in ranks if each is not None), default=None)
    seen = tuple(
        (tuple(points[each.value][path] for path in ranges), worst if mine is None else mine)
        for each, mine in zip(told, ranks, strict=True)
        if worst is not None
    )
    values = _ask(tuple(ranges.items()), seen, search.seed, number)
    return dict(zip(ranges, values, strict=True))


def check(study: Study) -> None:
    """Refuse a study with a search where Optuna is not installed."""
    if any(each.sweep is not None and each.sweep.search is not None for each in study.experiments):
        _optuna()


def there() -> bool:
    """Return whether Optuna is installed."""
    return importlib.util.find_spec("optuna") is not None


@lru_cache(maxsize=1024)
def _ask(ranges: _Ranges, told: _Told, seed: int, number: int) -> tuple[float, ...]:
    optuna = _optuna()
    distributions = {
        path: optuna.distributions.FloatDistribution(low, high, log=log)
        for path, (low, high, log) in ranges
    }
    # A sampler of its own for each trial: what it draws does not depend on who asked before.
    drawn = optuna.samplers.RandomSampler(seed=1000 * seed + number)
    sampler = drawn
    if told:
        sampler = optuna.samplers.GPSampler(
            seed=1000 * seed + number, independent_sampler=drawn, n_startup_trials=1
        )
    study = optuna.create_study(sampler=sampler)
    for values, metric in told:
        params = dict(zip(distributions, values, strict=True))
        made = optuna.trial.create_trial(params=params, distributions=distributions, value=metric)
        study.add_trial(made)
    found = study.ask(distributions).params
    return tuple(
        min(max(float(f"{found[path]:.{_DIGITS}g}"), low), high) for path, (low, high, _) in ranges
    )


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        came, fix = f"optuna, and it cannot be imported ({error})", "pip install 'tilewise[search]'"
        required = "a Python with the package optuna"
        raise InvalidArgument("sweep.search", came, required, fix) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
