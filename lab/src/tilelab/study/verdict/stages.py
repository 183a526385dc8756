"""Stages after an experiment: the factorial of its survivors, and its winner on fresh seeds.

Every stage is an experiment of its own, made from the verdict on the one before it. The rules are
those of ``config.Combine`` and ``config.Confirm``, which were there before the first run. So a
stage is a function of finished records alone, whoever asks and whenever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilelab.stats.factorial import arm_name, combinations_of, predicted
from tilelab.study.ask.config import Arm, Experiment, change
from tilelab.study.ask.designs import changes_of, fraction
from tilelab.study.ask.metrics import rank
from tilelab.study.ask.values import overlap
from tilelab.study.verdict.result import ArmVerdict, ExperimentVerdict, SweepResult
from tilelab.study.verdict.text import effect_text, listing

_FOUND = ("better", "worse", "better together", "worse together")


class Stage(NamedTuple):
    """An experiment and what its records say so far."""

    planned: Experiment
    verdict: ExperimentVerdict


def over(verdict: ExperimentVerdict) -> bool:
    """Return whether every run of an experiment has ended."""
    seeds = [each for arm in verdict.arms for each in arm.per_seed]
    return verdict.baseline.status != "incomplete" and all(
        each.status != "incomplete" for each in seeds
    )


def following(stages: Sequence[Stage]) -> tuple[Experiment | None, str]:
    """Return the experiment that the stages lead to, or None, and why, as a sentence."""
    first, last = stages[0].planned, stages[-1]
    if not over(last.verdict):
        return None, ""
    said = ""
    if first.combine is not None and len(stages) == 1:
        factors, said = _survivors(first, last.verdict)
        if len(factors) > 1:
            return combined(first, factors), said
    if first.confirm is None or last.planned.name == _name(first, "confirm"):
        return None, said
    if last.verdict.baseline.diverged:
        return None, f"{said} The baseline diverged: nothing is confirmed.".strip()
    winner, why = _winner(first, last, len(stages) == 1)
    said = f"{said} {why}".strip()
    return None if winner is None else confirmed(first, last.verdict.sweeps, winner), said


def combined(first: Experiment, factors: Sequence[str]) -> Experiment:
    """Return the factorial of some of an experiment's arms."""
    rule = first.combine
    assert rule is not None
    design = fraction(factors, rule.runs, rule.order)
    arms = tuple(
        Arm(name=arm_name(on), changes=_together(first, on)) for on in combinations_of(design) if on
    )
    return _stage(
        first,
        "combine",
        question=f"What do {listing(list(factors))} do alone, and beyond the sum of it together?",
        arms=arms,
        design=design,
        seeds=rule.seeds,
    )


def confirmed(first: Experiment, sweeps: Sequence[SweepResult], winner: str) -> Experiment:
    """Return the winner against the baseline on fresh seeds, with what ``sweeps`` tuned.

    The winner is an arm, or factors joined with ``+``.
    """
    rule = first.confirm
    assert rule is not None
    tuned = {each.arm: each.values or {} for each in sweeps}
    changes = {**_together(first, winner.split("+")), **tuned.get(winner, {})}
    baseline = change(first.baseline, tuned.get(first.baseline_name, {}))
    return _stage(
        first,
        "confirm",
        question=f"Does {winner} keep its lead on seeds that did not choose it?",
        baseline=baseline,
        arms=[{"name": winner, "changes": changes}],
        seeds=rule.seeds,
        sweep=None,
    )


def stand_ins(first: Experiment) -> list[Experiment]:
    """Return the expected later stages, for estimates: as many factors as may survive."""
    found = []
    names = [arm.name for arm in first.arms]
    if first.combine is not None and len(names) > 1:
        found.append(combined(first, names[: first.combine.most]))
    if first.confirm is not None and names:
        found.append(confirmed(first, (), names[-1]))
    return found


def follows(stage: Experiment, other: Experiment) -> bool:
    """Return whether a stage comes after another of the same experiment."""
    order = {"combine": 1, "confirm": 2}  # 0 for an experiment of the config
    places = [order.get(each.name.rpartition(".")[2], 0) for each in (stage, other)]
    return places[0] > places[1]


def _stage(first: Experiment, name: str, **fields: Any) -> Experiment:
    rules = ("combine", "confirm", "design", "sequential")
    values = {**dict.fromkeys(rules), **fields}
    return change(first, {"name": _name(first, name), **values})


def _name(first: Experiment, stage: str) -> str:
    return f"{first.name}.{stage}"


def _together(first: Experiment, factors: Sequence[str]) -> dict[str, Any]:
    """Return the changes of several factors: those of the arm that has them all, or of each."""
    each_of = {arm.name: arm.changes for arm in first.arms}
    # Arms of a design may name their factors in any order.
    sets = {frozenset(arm.split("+")): each for arm, each in each_of.items()}
    if (whole := sets.get(frozenset(factors))) is not None:
        return dict(whole)
    if first.design is not None:
        each_of = changes_of(first.design, each_of)
    return {path: value for each in factors for path, value in each_of[each].items()}


def _survivors(first: Experiment, verdict: ExperimentVerdict) -> tuple[list[str], str]:
    """Return the arms that go on, in the config's order, and why."""
    rule = first.combine
    assert rule is not None
    kept = ("better",) if rule.keep == "better" else ("better", "no difference", "undecided")
    changes = {arm.name: arm.changes for arm in first.arms}
    able = [arm for arm in verdict.arms if arm.label in kept and arm.effect is not None]
    ranked = sorted(able, key=lambda arm: _loss(verdict, arm))
    taken: list[str] = []
    apart: list[str] = []
    for arm in ranked:
        if len(taken) == rule.most:
            break
        others = [path for other in taken for path in changes[other]]
        if any(overlap(path, other) for path in changes[arm.arm] for other in others):
            apart.append(arm.arm)
        else:
            taken.append(arm.arm)
    names = [arm.name for arm in first.arms if arm.name in taken]
    shown = "shown to be better" if rule.keep == "better" else "not shown to be worse"
    said = f"{len(able)} of {len(verdict.arms)} arms were {shown}"
    said += f"; {listing(names)} go on together." if len(names) > 1 else "."
    if len(names) < 2:
        said += " There is nothing to combine."
    if apart:
        said += f" Left out, for what a better one changes too: {listing(apart)}."
    return names, said


def _loss(verdict: ExperimentVerdict, arm: ArmVerdict) -> float:
    """Return the effect of an arm, turned so that lower is better."""
    return rank(verdict.metric, arm.effect or 0.0)


def _winner(first: Experiment, last: Stage, alone: bool) -> tuple[str | None, str]:
    """Return the arm that is to be confirmed, or None, and why."""
    rule, verdict, planned = first.confirm, last.verdict, last.planned
    assert rule is not None
    if rule.winner == "predicted" and planned.design is not None:
        found = [each for each in verdict.effects if each.label in _FOUND]
        everything = planned.design.model_copy(update={"generators": {}})
        ranked = sorted(
            (rank(verdict.metric, predicted(found, on)), len(on), arm_name(on))
            for on in combinations_of(everything)
        )
        best, _, name = ranked[0]
        if not name or best >= 0:
            return None, "By the effects that were found, nothing beats the baseline."
        size = effect_text(rank(verdict.metric, best), planned.smallest_effect)
        return name, f"By the effects that were found, {name} is best ({size}): it is run again."
    arms = [arm for arm in verdict.arms if arm.effect is not None and not arm.diverged]
    if alone and first.combine is not None:
        kept, _ = _survivors(first, verdict)
        arms = [arm for arm in arms if arm.arm in kept]
    best_arm = min(arms, key=lambda arm: _loss(verdict, arm), default=None)
    if best_arm is None or _loss(verdict, best_arm) >= 0:
        return None, "Nothing has a better mean than the baseline: there is nothing to confirm."
    size = effect_text(best_arm.effect or 0.0, planned.smallest_effect)
    return best_arm.arm, (
        f"{best_arm.arm} has the best mean of {len(verdict.arms)} ({size}), which flatters the "
        "one that was chosen by it: it is run again on fresh seeds."
    )
