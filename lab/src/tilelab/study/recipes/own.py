"""A study of your own training: a function or a command, and the choices that it is given."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tilelab.study.ask.config import Budget, Experiment, RunConfig, Study, Sweep, Task
from tilelab.study.ask.values import as_invalid_argument
from tilelab.study.recipes.arms import factorial, one_at_a_time
from tilelab.study.tasks.script import digest
from tilewise.errors import InvalidArgument

Choices = Mapping[str, Any]


def own_study(
    name: str,
    train: Callable[..., Any] | str,
    *,
    metric: str,
    smallest_effect: float,
    baseline: Choices,
    arms: Mapping[str, Choices],
    higher_is_better: bool = False,
    seeds: int | Sequence[int] = 5,
    tune: Mapping[str, Sequence[float]] | None = None,
    together: bool = False,
    steps: int = 1,
    lines: str = "",
    files: Sequence[str | Path] = (),
    question: str = "",
    **rules: Any,
) -> Study:
    """Return a study whose runs are yours.

    Args:
        name: of the study.
        train: a command, such as ``"python train.py --lr {lr} --seed {seed} --out {folder}"``, or a
            function of the top of a file, which takes any of ``seed``, ``choices``, ``folder``,
            ``steps`` and ``log`` by name, and yields dictionaries or gives them to ``log``.
        metric: the key of its lines that decides.
        smallest_effect: the smallest difference of the metric that matters, above 0.
        baseline: choice -> value, of all choices that there are.
        arms: name -> what it changes of the baseline's choices.
        higher_is_better: of the metric.
        seeds: how many, 0 and up; or which.
        tune: one choice -> multiples of its value that are tried in every arm, the baseline too,
            before the runs that count; each trial is charged to its arm.
        together: run all combinations of the arms too, to see whether they add up.
        steps: what ``{steps}`` or ``steps`` is in a run that counts; trials of successive halving
            have less.
        lines: a file in the run's folder that has the lines of a command; standard output if empty.
        files: further ones that decide what a run does: their hash is part of the study's.
        question: in words.
        rules: more fields of ``config.Experiment``, such as ``sequential`` or ``confirm``.

    Raises:
        InvalidArgument: an arm changes or ``tune`` names a choice that the baseline does not have,
            a function that is inside another one, or what a config refuses.
    """
    unknown = [each for changes in arms.values() for each in changes if each not in baseline]
    if unknown:
        required = f"choices of the baseline: {', '.join(baseline) or 'it has none'}"
        raise InvalidArgument("arms", repr(unknown[0]), required, "Give it a value there.")
    paths = {
        arm: {f"choice.{choice}": value for choice, value in changes.items()}
        for arm, changes in arms.items()
    }
    made = factorial(paths) if together else one_at_a_time(paths)
    given = range(seeds) if isinstance(seeds, int) else seeds
    asked = f"Which of {', '.join(arms)} is worth having?"
    asked = asked if arms else "What does the baseline reach?"
    task = _task(train, metric, higher_is_better, lines, files)
    try:
        config = RunConfig(task=Task(**task), choice=dict(baseline), budget=Budget(steps=steps))
        experiment = Experiment(
            name=name,
            question=question or asked,
            baseline=config,
            arms=made,
            seeds=tuple(given),
            smallest_effect=smallest_effect,
            metric=task["metric"],
            **{"sweep": _sweep(tune, baseline), **rules},
        )
        return Study(name=name, question=experiment.question, experiments=(experiment,))
    except ValidationError as error:
        raise as_invalid_argument(error) from None


def _sweep(tune: Mapping[str, Sequence[float]] | None, baseline: Choices) -> Sweep | None:
    if not tune:
        return None
    if len(tune) > 1:
        raise InvalidArgument("tune", ", ".join(tune), "one choice: a sweep covers one value")
    ((choice, multiples),) = tune.items()
    if choice not in baseline:
        required = f"a choice of the baseline: {', '.join(baseline) or 'it has none'}"
        raise InvalidArgument("tune", repr(choice), required)
    return Sweep(path=f"choice.{choice}", multiples=tuple(multiples))


def _task(
    train: Callable[..., Any] | str,
    metric: str,
    higher: bool,
    lines: str,
    files: Sequence[str | Path],
) -> dict[str, Any]:
    own: dict[str, str] = {}
    found = [Path(each) for each in files]
    if isinstance(train, str):
        own["command"] = train
        with suppress(ValueError):  # of a quote that is not closed: the config says so
            found += [Path(word) for word in shlex.split(train) if Path(word).is_file()]
    else:
        file = inspect.getsourcefile(train)
        if file is None or train.__qualname__ != train.__name__ or train.__name__ == "<lambda>":
            required = "a function of the top of a file: each run finds it by its name"
            raise InvalidArgument("train", train.__qualname__, required)
        here = Path(file).resolve()
        if here.is_relative_to(Path.cwd()):
            here = here.relative_to(Path.cwd())
        own["function"] = f"{here}:{train.__name__}"
        found.append(here)
    for path in found:
        if not path.is_file():
            raise InvalidArgument("files", str(path), "a file that is there")
    return {
        "name": "script",
        **own,
        "metric": f"{'higher' if higher else 'lower'}:{metric}",
        "lines": lines,
        "files": tuple(map(str, found)),
        "sha256": digest(found),
    }
