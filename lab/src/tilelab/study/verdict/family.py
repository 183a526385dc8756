"""Families: the comparisons of a study that share its error rate, and how many they are.

Where ``Study.correction`` is ``"experiment"``, each experiment is a family. Where it is
``"study"``, one family has

* every arm of every experiment, and of every rung of a ladder;
* the main effects of every design. Its arms are combinations, which are adjusted among themselves:
  what a design decides are its effects.

Interactions are a second family. Stages that follow are chosen by earlier results and run on fresh
seeds: the ``combine`` of all experiments are a family, and so are the ``confirm``. They are counted
as many as they may become.

**Apart.** What an experiment with looks, a design or later stages does next follows from its
labels, which must not wait for other experiments. So Holm steps down among its own comparisons
alone, and takes all others of the family as not rejected. The first wrong rejection anywhere then
still has a p-value of at most its level over the number of true hypotheses: their sum is at most
alpha.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tilelab.stats.decide import NO_OTHERS, Others
from tilelab.stats.factorial import counted
from tilelab.stats.fractions import estimates
from tilelab.study.ask.config import Experiment, Study
from tilelab.study.verdict.stages import stand_ins


class Family(NamedTuple):
    """The comparisons that share the error rate of an experiment's."""

    size: int  # its own are among them
    others: Others = NO_OTHERS  # of other experiments
    interactions: int = 0  # of other experiments


Families = Mapping[str, Family]  # by the name of an experiment, a rung or a stage


def alone(experiment: Experiment) -> Family:
    """Return the family of an experiment that shares it with no other."""
    return Family(_comparisons(experiment))


def apart(experiment: Experiment) -> bool:
    """Return whether its decisions follow from its own records alone: see the top."""
    rules = (experiment.sequential, experiment.design, experiment.combine, experiment.confirm)
    return any(each is not None for each in rules)


def families_of(study: Study) -> dict[str, Family]:
    """Return the families of all experiments, rungs and stages, with others that are not known."""
    members = list(_members(study))
    if study.correction == "experiment":
        return {each.name: alone(each) for _, each in members}
    sizes, joint = Counter[str](), Counter[str]()
    for kind, each in members:
        sizes[kind] += _comparisons(each)
        joint[kind] += _interactions(each)
    found = {}
    for kind, each in members:
        others = sizes[kind] - _comparisons(each)
        unknown = NO_OTHERS.and_unknown(others, others)
        found[each.name] = Family(sizes[kind], unknown, joint[kind] - _interactions(each))
    return found


def _members(study: Study) -> Iterator[tuple[str, Experiment]]:
    """Yield every experiment that a study may have, with the kind of its family."""
    for experiment in study.experiments:
        for each in experiment.rungs.values() or (experiment,):
            yield "", each
        for each in stand_ins(experiment):
            yield each.name.rpartition(".")[2], each


def _comparisons(experiment: Experiment) -> int:
    design = experiment.design
    return len(experiment.tested) if design is None else len(design.factors)


def _interactions(experiment: Experiment) -> int:
    if experiment.sequential is not None:
        return 0
    if experiment.design is not None:
        return sum(len(each.factors) > 1 for each in estimates(experiment.design))
    return counted([arm.name for arm in experiment.tested])
