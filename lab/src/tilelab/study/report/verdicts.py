"""The verdict table: an arm per row, in words, with the scale on which effects are drawn."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence

from tilelab.study.ask import config
from tilelab.study.report.page import NONE, Band, Cell, Forest, Mark, VerdictRow
from tilelab.study.verdict import text as words
from tilelab.study.verdict.floors import not_learnt
from tilelab.study.verdict.result import (
    ArmMeasures,
    ArmVerdict,
    Cost,
    ExperimentVerdict,
    Label,
    Ratio,
    Summary,
)
from tilelab.study.verdict.text import UNITS, seeds_text

MARKS: dict[Label, Mark] = {
    "better": Mark("better", "\N{CHECK MARK}", "better"),
    "worse": Mark("worse", "\N{BALLOT X}", "worse"),
    "no difference": Mark("no difference", "=", "same"),
    "undecided": Mark("undecided", "?", "open"),
    "diverged": Mark("diverged", "!", "worse"),
    "incomplete": Mark("incomplete", "\N{HORIZONTAL ELLIPSIS}", "open"),
}
_FLAGGED = Mark("flagged", "\N{CHECK MARK}", "same")  # a control
_NOT_SEEN = Mark("not seen", "!", "worse")
_BASELINE = Mark("baseline", "\N{BULLET}", "base")
# The beginning of a reason that says what the table shows anyway: the effect, its interval, its p.
_SAID_BY_NUMBERS = re.compile(r"^[-+\d.e]+ [^\[(:;]+?(?: \[[^\]]*\])?(?: \(Holm p [^)]*\)\.|:) *")
_LIMIT = 4.0  # an interval further out than so many times the usual one is cut off


def digits_of(experiment: ExperimentVerdict) -> int:
    """Decimals that show a tenth of the smallest effect, or more where effects are smaller."""
    return max(words.digits_for(experiment.smallest_effect) - 1, 3)


def spelled(value: object) -> str:
    """Return a value of a config in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):  # a choice and its options
        parts = [f"{key} {spelled(each)}" for key, each in value.items() if key != "name"]
        return ", ".join([str(value["name"]), *parts] if "name" in value else parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(spelled, value))
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def forest_of(experiment: ExperimentVerdict) -> Forest | None:
    """Return the scale, always with zero and the smallest effect; None where there is no effect."""
    reach = [each for arm in experiment.arms if (each := _reach(arm)) is not None]
    if not reach:
        return None
    low, high = _domain(experiment)
    step = _round_step((high - low) / 4.6)
    first = -int(-low // step) * step
    digits = max(words.digits_for(step) - 2, 0)
    ticks, at = [], first
    while at <= high + 1e-12:
        ticks.append((_percent(at, low, high), words.signed(at, digits)))
        at += step
    smallest = experiment.smallest_effect
    return Forest(
        _percent(0, low, high),
        _percent(-smallest, low, high),
        _percent(smallest, low, high),
        tuple(ticks),
    )


def _reach(arm: ArmVerdict) -> tuple[float, float] | None:
    if arm.effect is None:
        return None
    ends = [arm.effect, *([arm.interval.low, arm.interval.high] if arm.interval else [])]
    return min(ends), max(ends)


def _domain(experiment: ExperimentVerdict) -> tuple[float, float]:
    reach = [each for arm in experiment.arms if (each := _reach(arm)) is not None]
    smallest = experiment.smallest_effect
    usual = statistics.median(max(abs(low), abs(high)) for low, high in reach)
    limit = max(_LIMIT * usual, 3 * smallest)
    low = max(min(-1.6 * smallest, *(low for low, _ in reach)), -limit)
    high = min(max(1.6 * smallest, *(high for _, high in reach)), limit)
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def _round_step(least: float) -> float:
    power = 10.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def _percent(value: float, low: float, high: float) -> float:
    return round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 2)


def _band(arm: ArmVerdict, experiment: ExperimentVerdict) -> Band | None:
    if arm.effect is None:
        return None
    low, high = _domain(experiment)
    seeds = [each.difference for each in arm.per_seed if each.difference is not None]
    inside = tuple(_percent(each, low, high) for each in seeds if low <= each <= high)
    point = _percent(arm.effect, low, high)
    if arm.interval is None:
        return Band(point, None, None, arm.effect < low, arm.effect > high, inside)
    return Band(
        point,
        _percent(arm.interval.low, low, high),
        _percent(arm.interval.high, low, high),
        arm.interval.low < low,
        arm.interval.high > high,
        inside,
    )


def row_of(
    arm: ArmVerdict, place: int, experiment: ExperimentVerdict, planned: config.Experiment
) -> VerdictRow:
    """Return an arm's row."""
    digits = digits_of(experiment)
    effect, interval = _in_words(arm, digits)
    p = Cell(words.p_value(arm.p_holm)) if arm.p_holm is not None else NONE
    if arm.label == "no difference" and arm.p_equivalence_holm is not None:
        p = Cell(p.text, f"equivalence {words.p_value(arm.p_equivalence_holm)}")
    return VerdictRow(
        arm=arm.arm,
        place=place,
        change=_change(arm.arm, experiment, planned) or "nothing changed",
        mark=_mark(arm),
        effect=effect,
        interval=interval,
        band=_band(arm, experiment),
        p=p,
        seeds=_seeds(arm),
        speed=_speed(arm),
        memory=_ratio(arm.measures.memory_ratio, better_above=False),
        cost=_cost(arm.cost),
        reason=_reason(arm.reason),
        flags=tuple(flag.words for flag in arm.kernel_flags),
        alarm=any(not flag.expected for flag in arm.kernel_flags),
        notes=tuple(words.typeset(note) for note in (arm.speed_withheld, *arm.notes) if note),
    )


def _mark(arm: ArmVerdict) -> Mark:
    if arm.flagged is not None:
        return _FLAGGED if arm.flagged else _NOT_SEEN
    mark = MARKS[arm.label]
    return mark._replace(label=f"{mark.label}, not learnt") if arm.neither_learnt else mark


def _change(arm: str, experiment: ExperimentVerdict, planned: config.Experiment) -> str:
    """Return what an arm changes; for a swept value, what its sweep chose."""
    changes = dict(next(each.changes for each in planned.arms if each.name == arm))
    sweep = next((each for each in experiment.sweeps if each.arm == arm), None)
    chosen = []
    if sweep is not None and sweep.chosen is not None:
        part, _, option = sweep.path.rpartition(".")
        changes.pop(sweep.path, None)
        if isinstance(changes.get(part), Mapping):
            changes[part] = {key: each for key, each in changes[part].items() if key != option}
        chosen = [f"{sweep.path} = {sweep.chosen:g} by its sweep"]
    return ", ".join([*(f"{path} = {spelled(each)}" for path, each in changes.items()), *chosen])


def _reason(sentence: str) -> str:
    """Return the part of a reason that the numbers beside it do not say."""
    rest = _SAID_BY_NUMBERS.sub("", sentence)
    return words.typeset(rest[:1].upper() + rest[1:])


def _in_words(arm: ArmVerdict, digits: int) -> tuple[str, str]:
    """Effect and interval; where all of it would round to zero, as powers of ten."""
    if arm.effect is None:
        return "", ""
    ends = (arm.interval.low, arm.interval.high) if arm.interval else ()
    said = differences((arm.effect, *ends), digits)
    return said[0], f"[{', '.join(said[1:])}]" if ends else ""


def differences(values: Sequence[float], digits: int) -> list[str]:
    """An arm's differences, all written alike: as powers of ten where all would round to zero."""
    tiny = max(map(abs, values), default=0.0) < 0.5 * 10.0**-digits
    return [words.power(each) if tiny else words.signed(each, digits) for each in values]


def baseline_row(experiment: ExperimentVerdict) -> VerdictRow:
    """Return the baseline's row: absolute numbers where the arms have ratios."""
    base, digits = experiment.baseline, digits_of(experiment)
    metric = metric_mean(base.measures, experiment)
    speed = base.measures["tokens_per_s"]
    memory = base.measures.memory
    notes = [f"Diverged with {seeds_text(base.diverged)}."] if base.diverged else []
    notes += [f"Not finished: {seeds_text(base.incomplete)}."] if base.incomplete else []
    decides = [each for each in experiment.floors if each.decides]
    notes += [not_learnt(base, each) for each in decides if base.learnt is False]
    return VerdictRow(
        arm=base.name,
        place=0,
        change="what the others are compared with",
        mark=_BASELINE,
        effect="" if metric is None else words.plain(metric, digits),
        seeds=words.count(base.n, "seed"),
        speed=NONE if speed is None else Cell(words.rate(speed.mean), "tokens/s"),
        memory=NONE if memory is None else Cell(words.size(memory.peak_bytes), "peak"),
        cost=_cost(base.cost),
        notes=tuple(notes),
    )


def metric_mean(measures: ArmMeasures, experiment: ExperimentVerdict) -> float | None:
    """Return the mean of the experiment's metric over the seeds."""
    own: dict[str, Summary | None] = {**measures.summaries, **measures.metrics}
    found = own.get(experiment.metric)
    return None if found is None else found.mean


def _seeds(arm: ArmVerdict) -> str:
    text = words.count(arm.n, "paired seed") if arm.n else "no pair yet"
    planned = len(arm.per_seed)
    if 0 < arm.n < planned:
        text = f"{arm.n} of {planned} paired seeds"
    if arm.label == "undecided" and arm.more_seeds:
        text += f", needs {arm.more_seeds:,} more"
    return text


def _speed(arm: ArmVerdict) -> Cell:
    if arm.speed_withheld:
        return Cell("withheld", tone="soft")
    return _ratio(arm.measures.speed_ratio, better_above=True)


def _ratio(ratio: Ratio | None, *, better_above: bool) -> Cell:
    """Return a ratio, toned where its whole interval lies on one side of 1."""
    if ratio is None:
        return NONE
    if ratio.interval is None:
        return Cell(words.ratio(ratio.value), "one seed" if ratio.n == 1 else "")
    low, high = ratio.interval.low, ratio.interval.high
    good = (ratio.value > 1.0) == better_above
    tone = ("best" if good else "bad") if _clear(ratio) and abs(ratio.value - 1) >= 0.02 else ""
    return Cell(words.ratio(ratio.value), f"{low:.2f} to {high:.2f}", tone)


def _clear(ratio: Ratio) -> bool:
    """Return whether its whole interval lies on one side of 1."""
    return ratio.interval is not None and (ratio.interval.low > 1 or ratio.interval.high < 1)


def _cost(cost: Cost) -> Cell:
    if not cost.runs:
        return NONE
    note = f"{words.shorten(float(f'{cost.tokens:.3g}'))} tokens"
    if cost.cpu_s is None:
        return Cell("withheld", note, tone="soft")
    if cost.sweep_runs and cost.sweep_cpu_s is not None:
        note = f"{words.duration(cost.sweep_cpu_s)} of it trials"
    return Cell(words.duration(cost.cpu_s), note)


def meaning(experiment: ExperimentVerdict) -> str:
    """Say what the verdicts mean, in one line."""
    unit, digits = UNITS[experiment.metric], digits_of(experiment)
    groups: dict[Label, list[ArmVerdict]] = {}
    controls = [arm for arm in experiment.arms if arm.kind == "control"]
    for arm in experiment.arms:
        if arm in controls:
            continue
        groups.setdefault(arm.label, []).append(arm)
    said = []
    for label in ("better", "worse"):
        found = sorted(groups.get(label, ()), key=lambda arm: abs(arm.effect or 0.0), reverse=True)
        said += [
            f"{arm.arm} is {label} by {words.plain(abs(arm.effect or 0.0), digits)} {unit}"
            for arm in found
        ]
    same = groups.get("no difference", [])
    if same:
        said.append(f"{_arms(same)} changed nothing that matters")
        said += _speeds(same, experiment.baseline.name)
    if "undecided" in groups:
        said.append(f"{_arms(groups['undecided'])} {_are(groups['undecided'])} undecided")
    if "diverged" in groups:
        said.append(f"{_arms(groups['diverged'])} diverged")
    if "incomplete" in groups:
        unfinished = groups["incomplete"]
        said.append(f"{_arms(unfinished)} {_are(unfinished)} not finished")
    neither = [arm for arm in experiment.arms if arm.neither_learnt]
    if neither:
        subject = f"{_arms(neither)} {_have(neither)} not learnt"
        floor = next(each.name for each in experiment.floors if each.decides)
        said.append(f"{subject} more than the {floor}, nor has {experiment.baseline.name}")
    for flagged, what in ((True, "flagged, as {} should be"), (False, "not seen")):
        found = [arm for arm in controls if arm.flagged is flagged]
        it = "it" if len(found) == 1 else "they"
        if found:
            said.append(f"{_arms(found)} {_was(found)} {what.format(it)}")
    return f"{'; '.join(said)}." if said else "There is nothing to compare yet."


def _arms(arms: Sequence[ArmVerdict]) -> str:
    return words.listing([arm.arm for arm in arms])


def _have(arms: Sequence[ArmVerdict]) -> str:
    return "has" if len(arms) == 1 else "have"


def _are(arms: Sequence[ArmVerdict]) -> str:
    return "is" if len(arms) == 1 else "are"


def _was(arms: Sequence[ArmVerdict]) -> str:
    return "was" if len(arms) == 1 else "were"


def _speeds(arms: Sequence[ArmVerdict], baseline: str) -> list[str]:
    """Say what systems arms gain once they have passed: a ratio is claimed only if it is clear."""
    known = [
        (arm.arm, arm.measures.speed_ratio)
        for arm in arms
        if arm.kind == "systems" and arm.measures.speed_ratio is not None
    ]
    clear = [
        f"{arm} is {words.times(ratio.value, 'faster', 'slower')}"
        for arm, ratio in known
        if _clear(ratio)
    ]
    unclear = [arm for arm, ratio in known if not _clear(ratio)]
    said = [f"against {baseline}, {words.listing(clear)}"] if clear else []
    if unclear:
        said.append(f"no clear difference in speed for {words.listing(unclear)}")
    return said
