"""Sequential comparisons: seeds are added until every arm is decided, by the rule of the config.

``config.Sequential`` has the levels. At a look, Holm's adjustment is over the arms at the look's
level. The family shrinks only by the arms that an earlier look rejected. The first wrong rejection
of all then has a p-value of at most the look's level over the number of arms for which the
hypothesis is true. These levels add up over looks and arms to alpha.

A look is taken when every open arm and the baseline have all of its seeds. Runs beyond the look are
not looked at, so the decision depends on the records alone and not on who ran when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tilelab.study.ask.config import Experiment, Sequential
from tilelab.study.verdict.decide import Comparison, Decision, Examined, Rules, decide, examine
from tilelab.study.verdict.result import Look

__all__ = ["Judged", "look_by_look"]


class Judged(NamedTuple):
    """A comparison, its tests, what was decided, and of a sequential one at which look."""

    compared: Comparison
    test: Examined
    decision: Decision
    look: Look | None = None


def look_by_look(
    experiment: Experiment, rule: Sequential, compared: Sequence[Comparison]
) -> list[Judged]:
    """Return the decisions about all arms of a sequential experiment, as far as its runs have come.

    Args:
        experiment: how it decides.
        rule: its looks.
        compared: every arm with all of the experiment's seeds, run or not.

    Returns:
        in the same order; each comparison cut to the seeds that its look asks for.
    """
    rules = Rules.of(experiment, max(len(compared), 1))
    levels = rule.levels(rules.alpha)
    found: dict[int, Judged] = {}
    for number, (count, level) in enumerate(zip(rule.looks, levels, strict=True), 1):
        left = [at for at in range(len(compared)) if at not in found]
        cut = [_first(compared[at], count) for at in left]
        at_look = replace(rules, confidence=1 - level)
        tests = examine(cut, at_look, _others(found))
        look = Look(number, len(rule.looks), level)
        judged = {
            at: Judged(each, test, decide(each, test, at_look), look)
            for at, each, test in zip(left, cut, tests, strict=True)
        }
        if any(each.decision.label == "incomplete" for each in judged.values()):
            return _in_order({**found, **{at: _waiting(each) for at, each in judged.items()}})
        last = number == len(rule.looks)
        found |= {
            at: _with_look(each)
            for at, each in judged.items()
            if last or each.decision.label != "undecided" or each.compared.baseline_diverged
        }
        if len(found) == len(compared):
            break
    return _in_order(found)


def _first(compared: Comparison, count: int) -> Comparison:
    """Return the same with the first seeds only."""
    seeds = tuple(compared.seeds[:count])
    known = {each.seed for each in seeds}
    diverged = tuple(seed for seed in compared.baseline_diverged if seed in known)
    return replace(compared, seeds=seeds, baseline_diverged=diverged)


def _others(found: dict[int, Judged]) -> tuple[int, int]:
    """Arms of earlier looks that still count: for the tests of a difference, and of equivalence."""
    labels = [each.decision.label for each in found.values()]
    same = labels.count("no difference")
    different = labels.count("better") + labels.count("worse")
    return len(labels) - different, len(labels) - same


def _waiting(each: Judged) -> Judged:
    """Nothing is decided before the look is taken, but for what diverged."""
    label, look = each.decision.label, each.look
    if label == "diverged" or look is None:
        return each
    if label == "incomplete":
        reason = f"Look {look.number} of {look.of}: {each.decision.reason}"
    else:
        reason = f"Look {look.number} of {look.of} waits for the other arms."
    unknown = replace(each.test, p_holm=None, p_equivalence=None, p_equivalence_holm=None)
    return each._replace(test=unknown, decision=Decision("incomplete", reason))


def _with_look(each: Judged) -> Judged:
    assert each.look is not None
    look, decision = each.look, each.decision
    seeds = len(each.compared.seeds)
    said = f"Look {look.number} of {look.of}, {seeds} seeds, level {look.level:.2g}."
    return each._replace(decision=replace(decision, reason=f"{decision.reason} {said}"))


def _in_order(found: dict[int, Judged]) -> list[Judged]:
    return [found[at] for at in sorted(found)]
