"""Overrides: ``path=value`` on the command line, laid over the study that a recipe made.

``optimizer.lr=0.001`` sets a value of every experiment's baseline, ``seeds=0,1`` a field of every
experiment, ``kernels.budget.steps=5`` either for the experiment of that name only. ``arms=`` and
``experiments=`` keep some of them, ``chip=`` and ``correction=`` are the study's own. An arm keeps
what it changes itself: ``notes`` says where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tilelab.study.ask.config import Experiment, RunConfig, Study, change
from tilelab.study.ask.values import nearest, value_at
from tilewise.errors import InvalidArgument

_OF_EXPERIMENT = tuple(
    key
    for key in Experiment.model_fields
    if key not in ("name", "baseline", "baseline_name", "arms")
)
_OF_STUDY = ("chip", "correction")
_OF_RUN = tuple(RunConfig.model_fields)


class _Override(NamedTuple):
    """``experiment`` is None where it is for all; ``text`` is the value as it was written."""

    experiment: str | None
    path: str
    text: str


def apply(study: Study, overrides: Sequence[str]) -> Study:
    """Return the study with the overrides laid over it, in order: see the top of this file.

    A value is read as JSON, else as a list where it has commas, else as text. Where text is wanted,
    it is taken as it is.

    Raises:
        InvalidArgument: no ``=``, an unknown key (the nearest is suggested), or a value that does
            not fit.
    """
    for each in overrides:
        study = _apply(study, _parse(study, each))
    return study


def notes(study: Study, overrides: Sequence[str]) -> list[str]:
    """Return what the overrides do not reach, in words: arms with an own value, and sweeps."""
    found = []
    for each in overrides:
        override = _parse(study, each)
        if override.path.split(".")[0] in _OF_RUN:
            for experiment in _targets(study, override):
                found += list(_kept(experiment, override.path))
    return list(dict.fromkeys(found))


def _kept(experiment: Experiment, path: str) -> Iterator[str]:
    meant = value_at(experiment.baseline, path)
    for arm in experiment.arms:
        own = value_at(experiment.config_of(arm.name), path)
        if own is None and meant is not None:
            yield f"{experiment.name}/{arm.name} has no {path}"
        elif own != meant:
            yield f"{experiment.name}/{arm.name} keeps its own {path}: {json.dumps(own)}"
    if experiment.sweep is not None and path in experiment.sweep.paths:
        yield f"{experiment.name}: the sweep chooses {path} for every arm"


def _parse(study: Study, override: str) -> _Override:
    path, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not path:
        raise InvalidArgument("--set", repr(override), "path=value, such as optimizer.lr=0.001")
    # A name may have dots of its own, and begin like another.
    for name in sorted((each.name for each in study.experiments), key=len, reverse=True):
        if path.startswith(f"{name}."):
            return _Override(name, path.removeprefix(f"{name}."), text)
    return _Override(None, path, text)


def _apply(study: Study, override: _Override) -> Study:
    root = override.path.split(".")[0]
    if override.path == "experiments" and override.experiment is None:
        return _keep_experiments(study, _names(override.text))
    if override.path in _OF_STUDY and override.experiment is None:
        return change(study, {override.path: override.text})
    if override.path == "arms":
        return _keep_arms(study, override)
    if root not in (*_OF_EXPERIMENT, *_OF_RUN):
        names = [f"{each.name}." for each in study.experiments]
        known = ["experiments", "arms", *_OF_STUDY, *_OF_EXPERIMENT, *_OF_RUN, *names]
        required = f"one of {', '.join(known)}"
        raise InvalidArgument(override.path, "an unknown key", required, nearest(root, known))

    def laid_over(experiment: Experiment) -> Experiment:
        if root in _OF_RUN:
            value = _value(override.text, value_at(experiment.baseline, override.path))
            baseline = change(experiment.baseline, {override.path: value})
            return change(experiment, {"baseline": baseline})
        value = _value(override.text, value_at(experiment, override.path))
        return change(experiment, {override.path: value})

    return _each(study, override, laid_over)


def _keep_experiments(study: Study, names: list[str]) -> Study:
    _check_names("experiments", names, [each.name for each in study.experiments])
    kept = [each for each in study.experiments if each.name in names]
    return change(study, {"experiments": kept})


def _keep_arms(study: Study, override: _Override) -> Study:
    """Keep some arms; an experiment of several that has none of them is left out."""
    names, targets = _names(override.text), _targets(study, override)
    known = [name for each in targets for name in each.arm_names]
    _check_names(override.path, names, list(dict.fromkeys(known)))
    left = [each.name for each in targets if not set(names) & set(each.arm_names)]

    def fewer(experiment: Experiment) -> Experiment:
        if experiment.name in left:
            return experiment
        kept, sweep = (*names, experiment.baseline_name), experiment.sweep
        changes: dict[str, Any] = {"arms": [arm for arm in experiment.arms if arm.name in kept]}
        if sweep is not None:
            values = {arm: each for arm, each in sweep.values.items() if arm in kept}
            changes["sweep.values"] = values
        return change(experiment, changes)

    whole = [each.name for each in study.experiments if each.name not in left]
    return _keep_experiments(_each(study, override, fewer), whole)


def _each(study: Study, override: _Override, changed: Callable[[Experiment], Experiment]) -> Study:
    targets = _targets(study, override)
    made = []
    for experiment in study.experiments:
        try:
            made.append(changed(experiment) if experiment in targets else experiment)
        except InvalidArgument as error:
            where = f"(In experiment {experiment.name!r}.)"
            fix = f"{error.fix} {where}".strip()
            raise InvalidArgument(error.argument, error.came, error.required, fix) from None
    return change(study, {"experiments": made})


def _targets(study: Study, override: _Override) -> list[Experiment]:
    wanted = override.experiment
    named = [each for each in study.experiments if wanted is None or each.name == wanted]
    swept = [each for each in named if each.sweep is not None]
    return swept if swept and override.path.startswith("sweep.") else named


def _check_names(path: str, names: list[str], known: list[str]) -> None:
    for name in names or [""]:
        if name not in known:
            required = f"some of {', '.join(known)}"
            raise InvalidArgument(path, repr(name), required, nearest(name, known))


def _names(text: str) -> list[str]:
    return [str(each) for each in _value(text, [])]


def _value(text: str, current: Any) -> Any:
    """Return the value that a text stands for, where ``current`` is the one that it replaces."""
    if isinstance(current, str):
        return json_or_text(text) if text.startswith('"') else text
    value = json_or_text(text)
    if isinstance(value, str) and "," in value and value == text:
        value = [json_or_text(each.strip()) for each in value.split(",")]
    if isinstance(current, list) and value is not None and not isinstance(value, list):
        value = [value]
    return value


def json_or_text(text: str) -> Any:
    """Return the value of JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
