"""The verdict table: an arm per row, in words, with the scale on which effects are drawn."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from tilelab.study.ask import config
from tilelab.study.ask.metrics import METRICS
from tilelab.study.report.ladders import ends
from tilelab.study.report.page import NONE, Band, Cell, Forest, Mark, VerdictRow
from tilelab.study.verdict import text as words
from tilelab.study.verdict.caveats import not_learnt
from tilelab.study.verdict.result import (
    ArmVerdict,
    Cost,
    ExperimentVerdict,
    Label,
    Ratio,
    StudyVerdict,
)
from tilelab.study.verdict.text import seeds_text

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
_MATTERS = 0.02  # of a ratio: less is not pointed out
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
    if all(arm.effect is None for arm in experiment.arms):
        return None
    low, high = _domain(experiment)
    round_ones = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    digits = max(words.digits_for(round_ones[1] - round_ones[0]) - 2, 0)
    ticks = tuple(
        (_percent(at, low, high), words.signed(at, digits))
        for at in map(float, round_ones)
        if low <= at <= high
    )
    smallest = experiment.smallest_effect
    zero, lower, upper = (_percent(at, low, high) for at in (0, -smallest, smallest))
    return Forest(zero, lower, upper, ticks)


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


def _percent(value: float, low: float, high: float) -> float:
    return round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 2)


def _band(arm: ArmVerdict, experiment: ExperimentVerdict) -> Band | None:
    reach = _reach(arm)
    if arm.effect is None or reach is None:
        return None
    low, high = _domain(experiment)
    seeds = [each.difference for each in arm.per_seed if each.difference is not None]
    return Band(
        point=_percent(arm.effect, low, high),
        low=None if arm.interval is None else _percent(reach[0], low, high),
        high=None if arm.interval is None else _percent(reach[1], low, high),
        cut_low=reach[0] < low,
        cut_high=reach[1] > high,
        seeds=tuple(_percent(each, low, high) for each in seeds if low <= each <= high),
    )


def row_of(
    arm: ArmVerdict,
    place: int,
    experiment: ExperimentVerdict,
    planned: config.Experiment,
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
        reason="" if arm.kind == "control" else _reason(arm.reason),  # it is no finding
        flags=tuple(flag.words for flag in arm.kernel_flags),
        alarm=any(not flag.expected for flag in arm.kernel_flags),
        notes=tuple(words.typeset(note) for note in (arm.speed_withheld, *arm.notes) if note),
    )


def _mark(arm: ArmVerdict) -> Mark:
    if arm.flagged is not None:
        return _FLAGGED if arm.flagged else _NOT_SEEN
    mark = MARKS[arm.label]
    if _wins(arm):  # what a kernel is for: a label that says only "equal" hides it
        assert arm.speed.ratio is not None
        gain = words.times(arm.speed.ratio.value, "faster", "slower")
        return mark._replace(label=f"{gain}, equal losses")
    return mark._replace(label=f"{mark.label}, not learnt") if arm.neither_learnt else mark


def _change(arm: str, experiment: ExperimentVerdict, planned: config.Experiment) -> str:
    """Return what an arm changes; for a swept value, what its sweep chose."""
    changes = dict(next(each.changes for each in planned.arms if each.name == arm))
    sweep = next((each for each in experiment.sweeps if each.arm == arm), None)
    chosen = []
    if sweep is not None and sweep.values is not None:
        for path in sweep.values:
            part, _, option = path.rpartition(".")
            changes.pop(path, None)
            if isinstance(changes.get(part), Mapping):
                changes[part] = {key: each for key, each in changes[part].items() if key != option}
        how = "sweep" if sweep.path in sweep.values else "search"
        chosen = [f"{path} = {value:g} by its {how}" for path, value in sweep.values.items()]
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
    metric = base.measures.mean(experiment.metric)
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
        memory=NONE if memory is None else Cell(words.amount(memory.peak_bytes), "peak"),
        cost=_cost(base.cost),
        notes=tuple(notes),
    )


def _seeds(arm: ArmVerdict) -> str:
    text = words.count(arm.n, "paired seed") if arm.n else "no pair yet"
    planned = len(arm.per_seed)
    if 0 < arm.n < planned:
        text = f"{arm.n} of {planned} paired seeds"
    if arm.label == "undecided" and arm.more_seeds and arm.kind != "control":
        text += f", needs {arm.more_seeds:,} more"
    return text


def _wins(arm: ArmVerdict) -> bool:
    """Return whether a systems arm is clearly of another speed, with losses that are equal."""
    equal = arm.kind == "systems" and arm.label == "no difference" and arm.agrees is not False
    speed = arm.speed.ratio
    return equal and speed is not None and _clear(speed) and abs(speed.value - 1) >= _MATTERS


def _speed(arm: ArmVerdict) -> Cell:
    speed = arm.speed
    if arm.speed_withheld:
        return Cell("withheld", tone="soft")
    if speed.ratio is None and speed.why:
        return Cell("withheld", speed.why, tone="soft")
    cell = _ratio(speed.ratio, better_above=True)
    return cell._replace(note=", ".join(filter(None, (cell.note, speed.why))))


def _ratio(ratio: Ratio | None, *, better_above: bool) -> Cell:
    """Return a ratio, toned where its whole interval lies on one side of 1."""
    if ratio is None:
        return NONE
    if ratio.interval is None:
        return Cell(words.ratio(ratio.value), "one seed" if ratio.n == 1 else "")
    low, high = ratio.interval.low, ratio.interval.high
    good = (ratio.value > 1.0) == better_above
    matters = _clear(ratio) and abs(ratio.value - 1) >= _MATTERS
    tone = ("best" if good else "bad") if matters else ""
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


_OPEN: dict[Label, str] = {
    "undecided": "{} undecided",
    "diverged": "diverged",
    "incomplete": "{} not finished",
}


def meaning(experiment: ExperimentVerdict) -> str:
    """Say what the verdicts mean, in one line."""
    groups: dict[Label, list[ArmVerdict]] = {}
    controls = [arm for arm in experiment.arms if arm.kind == "control"]
    for arm in experiment.arms:
        if arm.kind != "control":
            groups.setdefault(arm.label, []).append(arm)
    same = groups.get("no difference", [])
    wins = [arm for arm in same if _wins(arm)]
    said = _gains(wins, experiment.baseline.name)
    for label in ("better", "worse"):
        found = sorted(groups.get(label, ()), key=lambda arm: abs(arm.effect or 0.0), reverse=True)
        said += [f"{arm.arm} is {label} by {effect_words(arm, experiment)}" for arm in found]
    rest = [arm for arm in same if arm not in wins]
    if rest:
        said.append(f"{_arms(rest)} changed nothing that matters")
        said += _unclear(rest)
    for label, what in _OPEN.items():
        if found := groups.get(label, []):
            said.append(f"{_arms(found)} {what.format('is' if len(found) == 1 else 'are')}")
    neither = [arm for arm in experiment.arms if arm.neither_learnt]
    if neither:
        have = "has" if len(neither) == 1 else "have"
        subject = f"{_arms(neither)} {have} not learnt"
        floor = next(each.name for each in experiment.floors if each.decides)
        said.append(f"{subject} more than the {floor}, nor has {experiment.baseline.name}")
    for flagged, what in ((True, "flagged, as {} should be"), (False, "not seen")):
        found = [arm for arm in controls if arm.flagged is flagged]
        was, it = ("was", "it") if len(found) == 1 else ("were", "they")
        if found:
            said.append(f"{_arms(found)} {was} {what.format(it)}")
    return f"{'; '.join(said)}." if said else "There is nothing to compare yet."


def _arms(arms: Sequence[ArmVerdict]) -> str:
    return words.listing([arm.arm for arm in arms])


def _gains(arms: Sequence[ArmVerdict], baseline: str) -> list[str]:
    """Say what systems arms gain that have passed: the headline of a comparison of kernels."""
    gains = []
    for arm in arms:
        speed = arm.speed
        assert speed.ratio is not None
        clock = " by processor time" if speed.by == "processor" else ""
        gains.append(f"{arm.arm} is {words.times(speed.ratio.value, 'faster', 'slower')}{clock}")
    return [f"against {baseline}, {words.listing(gains)}, with equal losses"] if gains else []


def _unclear(arms: Sequence[ArmVerdict]) -> list[str]:
    shown = [arm.arm for arm in arms if arm.kind == "systems" and arm.speed.ratio is not None]
    withheld = [arm.arm for arm in arms if arm.kind == "systems" and arm.speed.ratio is None]
    said = [f"no clear difference in speed for {words.listing(shown)}"] if shown else []
    if withheld:
        said.append(f"the speed of {words.listing(withheld)} is withheld")
    return said


def effect_words(arm: ArmVerdict, experiment: ExperimentVerdict) -> str:
    """Return the size of an effect; of bits per byte also what it means.

    With a baseline of L bits per byte and an effect of e, the share of the bits is |e| / L, and the
    model gives a byte of text 2^|e| times the probability, as a geometric mean.
    """
    effect, digits = abs(arm.effect or 0.0), digits_of(experiment)
    said = f"{words.plain(effect, digits)} {METRICS[experiment.metric].unit}"
    base = experiment.baseline.measures.mean(experiment.metric)
    if experiment.metric != "bits_per_byte" or not base:
        return said
    fewer, likelier, times = "more", "less", 1 - 2**-effect
    if arm.label == "better":
        fewer, likelier, times = "fewer", "more", 2**effect - 1
    return (
        f"{said} ({_two_digits(effect / base)} {fewer} bits, each byte of text "
        f"{_two_digits(times)} {likelier} probable)"
    )


def _two_digits(share: float) -> str:
    return f"{100 * share:.2g} %"


_MOST_ANSWERS = 3  # of a kind, by name


def answer(verdict: StudyVerdict) -> str:
    """Answer the question of a study in a sentence, from all its experiments.

    A study with ladders answers by these alone. Empty while nothing is decided.
    """
    if verdict.ladders:
        rungs = {each.experiment: each for each in verdict.experiments}
        said = [
            ends(each, found, digits_of(found[-1]))
            for each in verdict.ladders
            if (found := [rungs[f"{each.experiment}.{rung}"] for rung in each.rungs])
        ]
        return " ".join(filter(None, said))
    gains: list[tuple[float, str]] = []
    better: list[tuple[float, str]] = []
    counts = Counter[str]()
    for experiment in verdict.experiments:
        where = f" in {experiment.experiment}" if len(verdict.experiments) > 1 else ""
        for arm in experiment.arms:
            speed = arm.speed.ratio
            if arm.kind == "control":
                continue
            if speed is not None and _wins(arm) and speed.value > 1:
                gains.append((-speed.value, f"{arm.arm} ({words.ratio(speed.value)}{where})"))
            elif arm.label == "better" and not arm.neither_learnt:
                size = abs(arm.effect or 0.0) / experiment.smallest_effect
                short = words.plain(abs(arm.effect or 0.0), digits_of(experiment))
                unit = METRICS[experiment.metric].unit
                better.append((-size, f"{arm.arm} (by {short} {unit}{where})"))
            elif arm.kind == "training":
                counts[arm.label] += 1
    said = []
    if gains:
        said.append(f"faster with equal losses: {_first(gains)}")
    if better:
        said.append(f"better than their baselines: {_first(better)}")
    elif counts and not counts["incomplete"]:
        said.append("nothing was shown to be better than its baseline")
    rest = [f"{counts[label]} {what}" for label, what in _REST.items() if counts[label]]
    if said and rest:
        said.append(f"the other arms: {words.listing(rest)}")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}." if said else ""


_REST: dict[str, str] = {
    "no difference": "without a difference that matters",
    "worse": "worse",
    "undecided": "undecided",
    "diverged": "diverged",
    "incomplete": "not finished",
}


def _first(ranked: Sequence[tuple[float, str]]) -> str:
    names = [said for _, said in sorted(ranked)]
    more = len(names) - _MOST_ANSWERS
    return words.listing(names[:_MOST_ANSWERS] + ([f"{more} more"] if more > 0 else []))
