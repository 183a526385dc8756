"""Doubts about a comparison: notes for the reader, the kernel guard, and the floors.

Does the comparison hold at all? The kernel guard asks: did an arm run other attention kernels than
the baseline, and did it ask to? An arm that switches the kernel as a side effect (attention dropout
does that to ``scaled_dot_product_attention`` on a CPU) measures two changes at once.

Have the arms learnt at all? Their final scores are held against floors (``ask.metrics.Floor``), of
which one decides. For language models it is the byte table of order 4 of the text that the
baseline's first run saw. For examples it is the constant answer, in the experiment's metric. An arm
has learnt where the mean of its final scores over the seeds is better than that. Floors change no
test and no label: what they say is put into words beside the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilelab.study.ask.config import Arm, Experiment, RunConfig, change
from tilelab.study.ask.metrics import BYTE_TABLE, METRICS, Floor, ahead, rank, reached
from tilelab.study.records.events import PROBED, UNNAMED, RunRecord
from tilelab.study.verdict.measures import final_metric, metric_of
from tilelab.study.verdict.result import (
    ArmMeasures,
    ArmVerdict,
    Baseline,
    ExperimentVerdict,
    FloorResult,
    KernelFlag,
    KernelUse,
)
from tilelab.study.verdict.text import count, layers_text, listing, plain, seeds_text

FIRST_STEPS = 20  # later, rounding grows with every step, whatever made it
# Of a loss of the first steps, where nothing but rounding differs: four spacings of float32. The
# stored studies show at most two, and a softmax scale that is wrong by 1 % fifteen.
MOST_DRIFT = 5e-7
_SPACING = 2.0**-23  # of float32 numbers, as a share of their size

# Weights that are equal give losses that differ by rounding, also of kernels and of bf16.
SAME_START = 5e-3
# What the speed of runs depends on, among what records keep of their machine.
_MACHINE = (
    "chip",
    "threads",
    "processes",
    "strategy",
    "context",
    "instruction_set",
    "versions",
    "commit",
)

Finals = Mapping[str, Mapping[int, RunRecord]]  # arm -> seed -> record


def experiment_notes(
    experiment: Experiment, finals: Finals, measures: Iterable[ArmMeasures]
) -> tuple[str, ...]:
    """Return notes that concern all arms of an experiment, each a sentence."""
    records = [each for runs in finals.values() for each in runs.values() if each.starts]
    notes = [
        *_texts(experiment, finals),
        *_machines(records),
        *_target(experiment, records),
        *_utilisation(measures),
    ]
    if len(experiment.seeds) == 1:
        notes.append("One seed only: nothing can be tested, so there are no error bars.")
    return tuple(notes)


def pairing_note(
    arm: Mapping[int, RunRecord], baseline: Mapping[int, RunRecord]
) -> tuple[str, ...]:
    """Return a warning where an arm did not start from the weights of the baseline.

    Where the shape of the model and the tokenizer are the baseline's, the first weights have to be
    the same to the bit. Where the text, the evaluation and the precision are too, the loss before
    the first step has to be the same.
    """
    pairs = [
        (seed, record, baseline[seed])
        for seed, record in arm.items()
        if record.starts and seed in baseline and baseline[seed].starts
    ]
    other = [seed for seed, mine, theirs in pairs if _other_weights(mine, theirs)]
    apart = [seed for seed, mine, theirs in pairs if _other_loss(mine, theirs)]
    if other:
        return (f"Not paired: the first weights are not the baseline's with {seeds_text(other)}.",)
    if not apart:
        return ()
    seeds = seeds_text(apart)
    return (f"Not paired: the loss before the first step is not the baseline's with {seeds}.",)


def _other_weights(record: RunRecord, other: RunRecord) -> bool:
    mine, theirs = record.start, other.start
    known = bool(mine.weights_sha256 and theirs.weights_sha256)
    comparable = _shape(mine.config) == _shape(theirs.config)
    return known and comparable and mine.weights_sha256 != theirs.weights_sha256


def _shape(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the first weights depend on, beside the seed."""
    model = {key: value for key, value in config["model"].items() if key != "dropout"}
    data = config["data"]
    return model, data["tokenizer"], data.get("vocabulary"), _task(config)


def _task(config: Mapping[str, Any]) -> Any:
    """Return the task; records that are older than tasks are of language models."""
    return config.get("task", {"name": "language-modelling"})


def _other_loss(record: RunRecord, other: RunRecord) -> bool:
    if _beginning(record.start.config) != _beginning(other.start.config):
        return False
    mine, theirs = _first(record), _first(other)
    if mine is None or theirs is None:
        return False
    return abs(mine - theirs) > SAME_START * theirs


def held_out_note(experiment: Experiment, arm: Arm) -> tuple[str, ...]:
    """Return a warning where the final loss of an arm is of another text than the baseline's.

    The same windows go through every seed. So a difference between two texts looks like an effect
    that is the same with every seed: no test can tell them apart.
    """
    mine, theirs = experiment.config_of(arm.name), experiment.baseline
    text = {"source", "size_cap_bytes", "held_out"}
    other = mine.data.model_dump(include=text) != theirs.data.model_dump(include=text)
    if other or mine.evaluation.text != theirs.evaluation.text:
        what = "of another held-out text"
    elif experiment.metric == "loss" and _tokens(mine) != _tokens(theirs):
        what = "per token of another tokenizer"
    elif mine.evaluation.documents != theirs.evaluation.documents:
        what = "of the held-out text read otherwise (evaluation.documents)"
    elif _scored(mine) != _scored(theirs):
        what = "of other windows of the held-out text"
    else:
        return ()
    return (f"The final loss is {what} than the baseline's: the effect is that of both changes.",)


def _scored(config: RunConfig) -> tuple[int | str, ...]:
    """Return a key of the tokens that the final evaluation scores, and of what is before them."""
    stride, context = config.evaluation.final_stride, config.model.context
    if stride:  # windows of the whole context score the same tokens, however long they are
        return () if stride == context else ("stride", stride, context)
    return config.evaluation.windows, context, *_tokens(config)


def _tokens(config: RunConfig) -> tuple[str, int]:
    return config.data.tokenizer, config.data.vocabulary


def rounding(experiment: Experiment, arm: Arm, finals: Finals) -> tuple[bool | None, str]:
    """Return whether a systems arm in float32 differs from the baseline by rounding only; a note.

    Its training losses of the first steps must be within ``MOST_DRIFT`` of the baseline's, or as
    close as those of an arm that changes only the last bit of its initial weights. Where there is
    such an arm, the final loss must be as close as that arm's, or within one spacing of float32.

    The note says how far the training losses are apart, by step. It says the same of the control,
    which only rounding drives away. The result is None, without a note, before all runs are over,
    for other arms, and for narrower types, which round too much for this comparison.
    """
    baseline = finals[experiment.baseline_name]
    drift = _drift(finals[arm.name], baseline)
    precision = experiment.baseline.training.precision
    narrow = precision != "float32" or experiment.baseline.learning.external
    if arm.kind == "training" or narrow or drift is None:
        return None, ""
    nudged = change(experiment.baseline, {"model.nudge": True})
    names = [] if nudged == experiment.baseline else [each.name for each in experiment.arms]
    controls = [name for name in names if experiment.config_of(name) == nudged]
    drifts = [_drift(finals[name], baseline) for name in controls]
    limit = max([MOST_DRIFT, *(each for each in drifts if each is not None)])
    agrees = None
    end = ": this is what rounding alone does"
    if arm.name not in controls:
        gap = _gap(finals[arm.name], baseline)
        known = [_gap(finals[name], baseline) for name in controls]
        allowed = max((each for each in known if each is not None), default=None)
        if gap is not None:
            close = allowed is None or gap <= max(allowed, _SPACING)
            agrees = drift <= limit and close
        others = [f"{value:.1e}" for value in drifts if value is not None]
        end = f" (rounding alone: {', '.join(others)})" if others else ""
    first = f"The training loss of the first {min(FIRST_STEPS, experiment.baseline.steps)} steps"
    apart = f"differs from the baseline's by at most {drift:.1e} of its value"
    if drift == 0:
        apart = "is the baseline's, to the last bit"
    limits = f"{limit:.2g} in these steps, and at the end what rounding alone does"
    parted = f" More than rounding explains: the limits are {limits}." if agrees is False else ""
    return agrees, f"{first} {apart}{end}.{parted}"


_FAULTS = {
    "scale": "a softmax scale that is wrong by 1 %",
    "mask": "a mask that is off by one",
}


def control_notes(experiment: Experiment, arms: Iterable[ArmVerdict]) -> tuple[str, ...]:
    """Say which faults a comparison could not have seen: those of controls that it did not flag."""
    missed = [arm.arm for arm in arms if arm.flagged is False]
    faults = {arm: experiment.config_of(arm).attention.fault for arm in missed}
    return tuple(
        f"This comparison could not have seen {_FAULTS.get(fault, f'what {arm} changes')}: the "
        f"control {arm}, which has it, was not flagged."
        for arm, fault in faults.items()
    )


def _gap(arm: Mapping[int, RunRecord], baseline: Mapping[int, RunRecord]) -> float | None:
    """Return the largest relative difference of the final held-out loss, over all seeds."""
    found = []
    for seed, record in arm.items():
        ours, theirs = (final_metric(each, "loss") for each in (record, baseline[seed]))
        if ours is None or not theirs:
            return None
        found.append(abs(ours - theirs) / theirs)
    return max(found, default=None)


def _drift(arm: Mapping[int, RunRecord], baseline: Mapping[int, RunRecord]) -> float | None:
    """Return the largest relative difference of training loss, over first steps and all seeds."""
    # Before all runs are over, fewer steps would be a smaller difference.
    if not all(record.done for runs in (arm, baseline) for record in runs.values()):
        return None
    found = []
    for seed, record in arm.items():
        theirs = {each.step: each.loss for each in baseline[seed].steps}
        for step in record.steps:
            other = theirs.get(step.step)
            if step.step <= FIRST_STEPS and step.loss is not None and other:
                found.append(abs(step.loss - other) / other)
    return max(found, default=None)


def _beginning(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the loss before the first step depends on."""
    without = ("dropout", "nudge")
    model = {key: value for key, value in config["model"].items() if key not in without}
    attention = config["attention"]
    variant = attention["variant"], attention.get("fault", "none")
    precision = config["training"]["precision"]
    return model, config["data"], config["evaluation"], variant, precision, _task(config)


def _first(record: RunRecord) -> float | None:
    """Return the loss before the first step, whatever the metric is; per byte for texts."""
    found = [each for each in record.evaluations if each.step == 0]
    if not found:
        return None
    return found[0].loss if found[0].bits_per_byte is None else found[0].bits_per_byte


def _texts(experiment: Experiment, finals: Finals) -> list[str]:
    """Arms with the same ``data`` have to have seen the same text."""
    texts: dict[str, set[Any]] = {}
    for arm, runs in finals.items():
        key = experiment.config_of(arm).data.model_dump_json()
        for start in (each for record in runs.values() for each in record.starts):
            texts.setdefault(key, set()).add(start.corpus.get("sha256"))
    if all(len(found) <= 1 for found in texts.values()):
        return []
    return ["The text was not the same in all runs (its hash differs): losses do not compare."]


def _machines(records: Sequence[RunRecord]) -> list[str]:
    """Runs of several machines, or of several versions, are not comparable in speed."""
    starts = [start for record in records for start in record.starts]
    differing = []
    for key in _MACHINE:
        seen = {repr(each.environment[key]) for each in starts if key in each.environment}
        if len(seen) > 1:
            differing.append(key.replace("_", " "))
    if not differing:
        return []
    what = ", ".join(differing)
    return [f"The runs were not all made alike ({what} differ): their speeds do not compare."]


def _target(experiment: Experiment, records: Sequence[RunRecord]) -> list[str]:
    if experiment.target is None:
        return []
    values = [
        value
        for record in records
        for each in record.evaluations
        if (value := metric_of(each, experiment.metric)) is not None
    ]
    over = records and all(record.done for record in records)
    if not over or not values:
        return []
    best = min(values, key=lambda value: rank(experiment.metric, value))
    if reached(experiment.metric, best, experiment.target):
        return []
    unit = METRICS[experiment.metric].unit
    return [
        f"No run reached the target of {experiment.target:g} {unit}; the best evaluation was "
        f"{best:.4g}. Every arm is censored."
    ]


def _utilisation(measures: Iterable[ArmMeasures]) -> list[str]:
    shares = [each["mfu_causal"] for each in measures]
    if max((each.mean for each in shares if each is not None), default=0.0) <= 1:
        return []
    return [
        "A utilisation (MFU) above 100 %: the peak that its run measured before the start was too "
        "low, probably because something else kept the machine busy."
    ]


Names = frozenset[str]


def kernel_uses(records: Iterable[RunRecord]) -> tuple[KernelUse, ...]:
    """Return the attention kernels of these runs, most calls first."""
    layers: dict[str, set[int]] = {}
    calls: dict[str, int] = {}
    for record in records:
        for each in record.kernels.layers if record.kernels is not None else ():
            layers.setdefault(each.kernel, set()).add(each.layer)
            calls[each.kernel] = calls.get(each.kernel, 0) + each.calls
    order = sorted(calls, key=lambda kernel: (-calls[kernel], kernel))
    return tuple(KernelUse(name, tuple(sorted(layers[name])), calls[name]) for name in order)


def kernel_flags(
    experiment: Experiment, arm: str, ran: Sequence[KernelUse], baseline: Sequence[KernelUse]
) -> tuple[KernelFlag, ...]:
    """Return a flag for each pair of kernels that differ from the baseline's, by layers."""
    if not ran or not baseline:
        return ()
    mine, theirs = _by_layer(ran), _by_layer(baseline)
    every = frozenset[str]().union(*theirs.values())
    differing: dict[tuple[Names, Names], list[int]] = {}
    for layer, names in sorted(mine.items()):
        other = theirs.get(layer, every)  # an arm with more layers has no counterpart for some
        if names != other:
            differing.setdefault((names, other), []).append(layer)
    kind = next(each.kind for each in experiment.arms if each.name == arm)
    wanted = experiment.config_of(arm).attention.implementation
    # The arm says by itself that another attention runs.
    expected = kind != "training" or wanted != experiment.baseline.attention.implementation
    flags = []
    for (names, other), layers in differing.items():
        own, base = " and ".join(sorted(names)), " and ".join(sorted(other))
        words = f"{layers_text(layers, len(mine))} ran {own}, where the baseline ran {base}"
        if expected:
            words += ", as the arm asks."
        elif any(name.endswith(UNNAMED) for name in names | other):
            words += ". A record does not name its kernel: they may be the same."
        else:
            words += (
                ". The arm did not ask for that: its speed and memory are those of both changes "
                "together."
            )
        flags.append(KernelFlag(own, base, tuple(layers), expected, words))
    return tuple(flags)


def _by_layer(uses: Sequence[KernelUse]) -> dict[int, Names]:
    """Layer -> its kernels, however they became known: compiling is no other attention."""
    layers = {layer for use in uses for layer in use.layers}
    return {
        layer: frozenset(use.kernel.removesuffix(PROBED) for use in uses if layer in use.layers)
        for layer in layers
    }


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
