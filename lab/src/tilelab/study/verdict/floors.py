"""Whether arms have learnt at all: their final scores against floors (``ask.metrics.Floor``).

One floor decides. For language models it is the byte table of order 4 of the text that the
baseline's first run saw. For examples it is the constant answer, in the experiment's metric.
An arm has learnt where the mean of its final scores over the seeds is better than that.

Floors change no test and no label: what they say is put into words beside the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tilelab.study.ask.metrics import BYTE_TABLE, METRICS, Floor, ahead, rank
from tilelab.study.verdict.result import ArmVerdict, Baseline, ExperimentVerdict, FloorResult
from tilelab.study.verdict.text import count, listing, plain

_OF_TEXT = ("bits_per_byte", "loss")  # metrics of a language model
_DECIDES = (f"{BYTE_TABLE} 4", "seen")
_DIGITS = 3
_WHERE = {"none": "", "seen": " of the text that was seen", "all": " of all training text"}


def with_floors(
    verdict: ExperimentVerdict, floors: Sequence[Floor], comparable: Collection[str]
) -> ExperimentVerdict:
    """Return a verdict with its floors, and with words where an arm has not learnt.

    ``comparable`` names the arms whose held-out data is the baseline's.
    """
    if not floors:
        return verdict
    arms = [each for each in verdict.all_arms if each.name in comparable]
    chosen = _deciding(floors, verdict.metric)
    learnt = {} if chosen is None else {each.name: _beats(each, chosen) for each in arms}
    results = tuple(
        FloorResult(
            **vars(floor),
            decides=floor == chosen,
            beaten_by=tuple(each.name for each in arms if _beats(each, floor)),
        )
        for floor in floors
    )
    base = replace(verdict.baseline, learnt=learnt.get(verdict.baseline.name))
    judged = tuple(
        _judged(replace(each, learnt=learnt.get(each.name)), base, chosen) for each in verdict.arms
    )
    notes = verdict.notes
    if chosen is not None and (said := _sentence(base, judged, floors, chosen)):
        notes += (said,)
    return replace(verdict, baseline=base, arms=judged, floors=results, notes=notes)


def not_learnt(arm: Baseline | ArmVerdict, floor: Floor) -> str:
    """Say that an arm has not learnt: how it ended, and what the floor is."""
    score = arm.measures.mean(floor.metric)
    assert score is not None
    unit = METRICS[floor.metric].unit
    value, least = plain(score, _DIGITS), plain(floor.value, _DIGITS)
    where = _WHERE[floor.text]
    return f"Not learnt: it ends at {value} {unit}, and the {floor.name}{where} scores {least}."


def _judged(arm: ArmVerdict, base: Baseline, chosen: Floor | None) -> ArmVerdict:
    # A comparison of kernels asks whether steps are the same, not what is learnt in them.
    if chosen is None or arm.learnt is not False or arm.kind != "training":
        return arm
    if base.learnt is not False:
        return replace(arm, notes=(*arm.notes, not_learnt(arm, chosen)))
    least = f"{plain(chosen.value, _DIGITS)} {METRICS[chosen.metric].unit}"
    said = f"Neither it nor {base.name} has learnt more than the {chosen.name} ({least})."
    return replace(arm, neither_learnt=True, reason=f"{arm.reason} {said}")


def _deciding(floors: Sequence[Floor], metric: str) -> Floor | None:
    if metric in _OF_TEXT:
        return next((each for each in floors if (each.name, each.text) == _DECIDES), None)
    return next((each for each in floors if each.metric == metric), None)


def _beats(arm: Baseline | ArmVerdict, floor: Floor) -> bool | None:
    score = arm.measures.mean(floor.metric)
    return None if score is None else ahead(floor.metric, score - floor.value)


def _sentence(
    base: Baseline, arms: Sequence[ArmVerdict], floors: Sequence[Floor], chosen: Floor
) -> str:
    """Say where the baseline stands among the floors, and which arms have not learnt."""
    score = base.measures.mean(chosen.metric)
    if base.learnt is None or score is None:
        return ""

    def named(floor: Floor) -> str:
        return f"the {floor.name}{_WHERE[floor.text]} ({plain(floor.value, _DIGITS)})"

    rivals = [each for each in floors if each.metric == chosen.metric]
    ahead_of = [each for each in rivals if not _beats(base, each)]
    ends = f"{base.name} ends at {plain(score, _DIGITS)} {METRICS[chosen.metric].unit}"
    if base.learnt:
        said = f"{ends}, better than {named(chosen)}"
        if ahead_of:  # the next one up
            said += f" and no better than {named(_easiest(ahead_of, chosen.metric))}"
        said += "."
    else:
        same = [each for each in ahead_of if each.text == chosen.text]
        tables = [each for each in same if each.name.startswith(BYTE_TABLE)] or same
        easiest = _easiest(tables, chosen.metric)
        more = "counts" if chosen.metric == "bits_per_byte" else "that"
        said = f"{ends}: no better than {named(easiest)}, so it has not learnt more than {more}."
    without = [each.name for each in arms if each.learnt is False]
    if without and len(without) == len(arms) and not base.learnt:
        said += f" No arm is better than {named(chosen)}." if len(arms) > 1 else ""
    elif without:
        those = listing(without) if len(without) <= 4 else count(len(without), "arm")
        said += f" Not learnt, against {named(chosen)}: {those}."
    return said


def _easiest(floors: Sequence[Floor], metric: str) -> Floor:
    return max(floors, key=lambda each: rank(metric, each.value))
