"""The tables below the verdicts: every measure, per arm and per seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilelab.study.ask import config
from tilelab.study.ask.metrics import METRICS
from tilelab.study.need import Need, need
from tilelab.study.records.store import flat
from tilelab.study.report.costs import PARTS, pareto_table, parts_of, survival_table
from tilelab.study.report.lines import ArmLayers, Series
from tilelab.study.report.page import NONE, Cell, Table
from tilelab.study.report.tuning import effects_table, interactions_table, sweep_table
from tilelab.study.report.verdicts import differences, digits_of, spelled
from tilelab.study.verdict import text as words
from tilelab.study.verdict.measures import MEASURES, Measure
from tilelab.study.verdict.result import (
    ArmMeasures,
    ArmVerdict,
    Baseline,
    ExperimentVerdict,
    Summary,
)

_CURVE_ROWS = 12  # of the table of the curves, about
_Show = Callable[[float], str]


_Arm = Baseline | ArmVerdict


def evidence_tables(experiment: ExperimentVerdict) -> tuple[Table, ...]:
    """Return every table that there is something for, in the order in which it is asked."""
    found = (
        effects_table(experiment),
        interactions_table(experiment),
        _seeds(experiment),
        _quality(experiment),
        _speed(experiment),
        _memory(experiment),
        _target(experiment),
        survival_table(experiment),
        pareto_table(experiment),
        _kernels(experiment),
        sweep_table(experiment),
        _cost(experiment),
    )
    return tuple(table for table in found if table is not None and table.rows)


_FLOOR_DIGITS = 3
_NAMED = 6  # arms in a cell, by name
GPT2_SMALL = 37.5  # word perplexity on WikiText-103


def floors_table(experiment: ExperimentVerdict, planned: config.Experiment) -> Table | None:
    """Return the floors and the arms that are better; None where no floors are stored."""
    floors = experiment.floors
    if not floors:
        return None
    texts = {each.bytes_seen for each in floors if each.text != "none"}
    if len(texts) == 1:  # a run that saw all
        floors = tuple(each for each in floors if each.text != "all")
    units = {METRICS[each.metric].unit for each in floors}
    words_of = any(each.word_perplexity is not None for each in floors)
    rows = []
    for each in floors:
        where = "nothing" if each.text == "none" else f"{words.amount(each.bytes_seen)} of text"
        said = {"seen": "what was seen", "all": "all of it"}.get(each.text, "")
        cells = [
            Cell(each.name, "decides whether an arm has learnt" if each.decides else ""),
            Cell(where, said),
            Cell(
                words.plain(each.value, _FLOOR_DIGITS),
                METRICS[each.metric].unit if len(units) > 1 else "",
            ),
        ]
        if words_of:
            perplexity = each.word_perplexity
            cells.append(NONE if perplexity is None else Cell(words.plain(perplexity, 1)))
        rows.append((*cells, Cell(_beaten_by(each.beaten_by, experiment))))
    if words_of:
        rows.append(_reported(experiment))
    notes = [
        "What something much simpler than a model scores on the same held-out data. An arm whose "
        "mean final score is not better than the floor that decides has not learnt."
    ]
    of_text = any(each.metric == "bits_per_byte" for each in floors)
    if of_text and not planned.baseline.evaluation.final_stride:
        notes.append("Floors score all of the held-out text, the arms windows of it.")
    if of_text and not any(each.text == "all" for each in experiment.floors):
        notes.append("All of the training text is too long to count and compress.")
    if words_of:
        notes.append(
            "The last row is no floor: a published result, of the test text of WikiText-103, by a "
            "model that has not trained on WikiText (Radford et al., Language Models are "
            "Unsupervised Multitask Learners, 2019, table 3)."
        )
    score = units.pop() if len(units) == 1 else "score"
    head = ("floor", "learnt from", score, *(["word perplexity"] if words_of else []))
    return Table("Floors", (*head, "arms that are better"), tuple(rows), tuple(notes), "floors")


def _reported(experiment: ExperimentVerdict) -> tuple[Cell, ...]:
    """Return the row of GPT-2 small, so that a reader sees how far a model is from it."""
    scores = {each.name: each.measures.mean("word_perplexity") for each in experiment.all_arms}
    better = [arm for arm, score in scores.items() if score and score < GPT2_SMALL]
    return (
        Cell("GPT-2, 124 million parameters", "as published"),
        Cell("40 GB of web text"),
        NONE,
        Cell(words.plain(GPT2_SMALL, 1)),
        Cell(_beaten_by(better, experiment)),
    )


def _beaten_by(arms: Sequence[str], experiment: ExperimentVerdict) -> str:
    every = len(experiment.all_arms)
    if len(arms) in (0, every):
        return "all" if arms else "none"
    return words.listing(arms) if len(arms) <= _NAMED else f"{len(arms)} of {every}"


def _number_cell(summary: Summary | None, show: _Show) -> Cell:
    """Return the mean, and below it the spread over the seeds."""
    if summary is None:
        return NONE
    if summary.spread is None:
        return Cell(show(summary.mean), "one seed")
    return Cell(show(summary.mean), f"± {show(summary.spread)}")


def _table(
    title: str,
    experiment: ExperimentVerdict,
    columns: Sequence[tuple[str, Callable[[_Arm], Cell]]],
    notes: tuple[str, ...] = (),
    key: str = "",
) -> Table | None:
    """Return a row per arm; columns and rows of which nothing is known are left out."""
    arms = experiment.all_arms
    shown = [(name, [show(arm) for arm in arms]) for name, show in columns]
    kept = [(name, cells) for name, cells in shown if any(cell != NONE for cell in cells)]
    if not kept:
        return None
    rows = tuple((Cell(arm.name), *(cells[at] for _, cells in kept)) for at, arm in enumerate(arms))
    return Table(title, ("arm", *(name for name, _ in kept)), rows, notes, key)


def _columns(experiment: ExperimentVerdict, table: str) -> list[tuple[str, Callable[[_Arm], Cell]]]:
    plain = words.fixed(_digits(experiment))

    def shown(measure: Measure) -> Callable[[_Arm], Cell]:
        def cell(arm: _Arm) -> Cell:
            summary, end = arm.measures[measure.name], arm.measures[measure.to or measure.name]
            show = measure.show or plain
            if not measure.to or summary is None or end is None:
                return _number_cell(summary, show)
            return Cell(f"{show(summary.mean)} to {show(end.mean)}")

        return cell

    return [(each.column, shown(each)) for each in MEASURES.values() if each.table == table]


def _digits(experiment: ExperimentVerdict) -> int:
    return max(digits_of(experiment), 4)


def _quality(experiment: ExperimentVerdict) -> Table | None:
    plain = words.fixed(_digits(experiment))
    names = dict.fromkeys(name for arm in experiment.all_arms for name in arm.measures.metrics)

    def of_task(metric: str) -> Callable[[_Arm], Cell]:
        return lambda arm: _number_cell(arm.measures.metrics.get(metric), plain)

    return _table(
        "Quality and stability",
        experiment,
        [
            *_columns(experiment, "quality"),
            *((METRICS[name].unit, of_task(name)) for name in names),
            *_columns(experiment, "stability"),
        ],
        ("Held-out data after the last step; mean and standard deviation over the seeds.",),
        "quality",
    )


# What the wall clock has no part in.
_BY_PROCESSOR = MEASURES["tokens_per_cpu_s"].column


def _speed(experiment: ExperimentVerdict) -> Table | None:
    slowed = experiment.slowed

    def unless_slowed(name: str, show: Callable[[_Arm], Cell]) -> Callable[[_Arm], Cell]:
        hidden = name != _BY_PROCESSOR
        return lambda arm: NONE if hidden and arm.name in slowed else show(arm)

    columns = [(name, unless_slowed(name, show)) for name, show in _columns(experiment, "speed")]
    withheld = [arm.arm for arm in experiment.arms if arm.speed_withheld]
    notes = [
        "Optimizer steps alone: evaluation and the first steps of a process are left out. Of a "
        "script: from its first line on, all that it does before a line of another step."
    ]
    if withheld:
        notes.append(
            f"Withheld for {words.listing(withheld)}: a systems arm shows its speed only once its "
            "losses have been found equal."
        )
    if slowed:
        notes.append(
            f"Of {words.listing(slowed)} by processor time alone: other work on the machine moved "
            "the wall clock."
        )
    return _table("Speed", experiment, columns, tuple(notes), "speed")


def _memory(experiment: ExperimentVerdict) -> Table | None:
    def part(name: str) -> Callable[[_Arm], Cell]:
        def show(arm: _Arm) -> Cell:
            split = arm.measures.memory
            if split is None:
                return NONE
            found = {**parts_of(split), "peak": split.peak_bytes}.get(name)
            return NONE if found is None else Cell(words.amount(found))

        return show

    columns = [(name, part(name)) for name in (*PARTS, "peak")]
    return _table("Memory", experiment, columns, (), "memory")


def _target(experiment: ExperimentVerdict) -> Table | None:
    results = [arm.target for arm in experiment.all_arms if arm.target is not None]
    if not results:
        return None

    def shown(name: str, show: _Show, ratio: str = "") -> Callable[[_Arm], Cell]:
        def cell(arm: _Arm) -> Cell:
            if arm.target is None or not arm.target.tokens:
                return NONE
            value = getattr(arm.target, f"median_{name}")
            if value is None:
                half = arm.target.reached * 2 > len(arm.target.tokens)
                return NONE if half else Cell("not reached", tone="soft")
            found = getattr(arm.target, ratio) if ratio else None
            return Cell(show(value), "" if found is None else words.ratio(found.value))

        return cell

    def reached(arm: _Arm) -> Cell:
        if arm.target is None:
            return NONE
        return Cell(f"{arm.target.reached} of {len(arm.target.tokens)}")

    return _table(
        f"To {results[0].target:g} {METRICS[experiment.metric].unit}",
        experiment,
        [
            ("seeds that reached it", reached),
            ("tokens, median", shown("tokens", words.integer, "tokens_ratio")),
            *(
                []
                if experiment.slowed
                else [("time", shown("wall_s", words.duration, "wall_ratio"))]
            ),
            ("CPU time", shown("cpu_s", words.duration)),
        ],
        (
            "A miss is censored: it counts as longer than any run that reached the target. Ratios "
            "are to the baseline, where every seed of both reached it.",
        ),
        "target",
    )


def _kernels(experiment: ExperimentVerdict) -> Table:
    rows = []
    for arm in experiment.all_arms:
        for use in arm.measures.kernels:
            layers = ", ".join(map(str, use.layers))
            texts = (arm.name, use.kernel, layers, words.integer(use.calls))
            rows.append(tuple(map(Cell, texts)))
    return Table(
        "Attention kernels that ran",
        ("arm", "kernel", "layers", "forward passes"),
        tuple(rows),
        ("Seen in the autograd graph of each layer in training, over all seeds.",),
        "kernels",
        text=True,
    )


def _or_withheld(value: float | None, show: _Show, note: str = "") -> Cell:
    return Cell("withheld", note, tone="soft") if value is None else Cell(show(value), note)


def _cost(experiment: ExperimentVerdict) -> Table | None:
    def trials(arm: _Arm) -> Cell:
        if not arm.cost.sweep_runs:
            return NONE
        runs = words.count(arm.cost.sweep_runs, "run")
        return _or_withheld(arm.cost.sweep_cpu_s, words.duration, runs)

    def of(name: str, show: _Show) -> Callable[[_Arm], Cell]:
        return lambda arm: _or_withheld(getattr(arm.cost, name), show) if arm.cost.runs else NONE

    return _table(
        "What it cost",
        experiment,
        [
            ("runs", of("runs", words.integer)),
            ("tokens", of("tokens", words.integer)),
            ("CPU time", of("cpu_s", words.duration)),
            ("wall time, added up", of("wall_s", words.duration)),
            ("of it trials", trials),
        ],
        ("All runs of the arm, trials of a sweep and runs that diverged included.",),
        "cost",
    )


def _seeds(experiment: ExperimentVerdict) -> Table | None:
    if not experiment.arms:
        return None
    digits = _digits(experiment)
    # Of a sequential experiment arms have as many seeds as they needed.
    longest = max((arm.per_seed for arm in experiment.arms), key=len)
    written = []
    for arm in experiment.arms:
        known = {each.seed: each.difference for each in arm.per_seed if each.difference is not None}
        texts = differences(list(known.values()), digits)
        written.append(dict(zip(known, texts, strict=True)))
    rows = []
    for at, seed in enumerate(longest):
        base = Cell("" if seed.baseline is None else words.plain(seed.baseline, digits))
        cells = [base if base.text else NONE]
        for arm, said in zip(experiment.arms, written, strict=True):
            if at >= len(arm.per_seed):
                cells.append(Cell("not needed", tone="soft"))
                continue
            result = arm.per_seed[at]
            if result.difference is not None:
                same = "the same bits" if result.identical else ""
                cells.append(Cell(said[result.seed], same))
            else:
                tone = "bad" if result.status == "diverged" else "soft"
                cells.append(Cell(result.status, tone=tone))
        rows.append((Cell(f"seed {seed.seed}"), *cells))
    head = (
        "",
        experiment.baseline.name,
        *(f"{arm.arm} {words.MINUS} {experiment.baseline.name}" for arm in experiment.arms),
    )
    unit = METRICS[experiment.metric].unit
    note = f"{unit[0].upper()}{unit[1:]}; the difference of every arm with the same seed."
    return Table("Seed by seed", head, tuple(rows), (note,), "effect")


def attention_table(
    arms: Sequence[ArmLayers], measures: Mapping[str, ArmMeasures], without: Sequence[str]
) -> Table | None:
    """Tabulate every layer at the last evaluation, and the measures of the whole run."""
    if not arms:
        return None
    rows = []
    for layer in range(max(len(each.logits) for each in arms)):
        cells = [_layer_cell(each, layer) if layer < len(each.logits) else NONE for each in arms]
        rows.append((Cell(f"layer {layer}"), *cells))
    whole = [measures[each.arm] for each in arms]
    for measure in MEASURES.values():
        if measure.table == "attention":
            cells = [
                _number_cell(each[measure.name], measure.show or words.fixed(3)) for each in whole
            ]
            rows.append((Cell(measure.column), *cells))
    notes = [
        "Layers: entropy in nats, mean over the heads and the seeds, at the last evaluation. The "
        "last two rows: the outermost of all layers and evaluations."
    ]
    if without:
        notes.append(
            f"Nothing of {words.listing(list(without))}: only tilewise's kernels keep statistics, "
            "and only where evaluation.attention_windows asks for them."
        )
    head = ("", *(each.arm for each in arms))
    return Table("Attention by layer", head, tuple(rows), tuple(notes), "attention")


def _layer_cell(each: ArmLayers, layer: int) -> Cell:
    low, logit = each.lowest_head[layer][-1], each.logits[layer][-1]
    note = f"lowest head {words.plain(low, 2)}, logits up to {words.plain(logit, 2)}"
    return Cell(words.plain(each.entropy[layer][-1], 2), note)


def curve_table(
    tokens: Sequence[Series], time: Sequence[Series], experiment: ExperimentVerdict
) -> Table | None:
    """Return the curves as numbers, for those who cannot see the figures."""
    drawn = [each for each in tokens if each.x]
    if not drawn:
        return None
    digits = digits_of(experiment)
    seconds = {each.arm: each.x for each in time}
    every = sorted({x for each in drawn for x in each.x})
    stride = -(-len(every) // _CURVE_ROWS)
    shown = sorted({*every[::stride], every[-1]})
    rows = []
    for x in shown:
        cells = [Cell(words.integer(x))]
        for each in drawn:
            if x not in each.x:
                cells.append(NONE)
                continue
            at = each.x.index(x)
            note = words.duration(seconds[each.arm][at]) if each.arm in seconds else ""
            cells.append(Cell(words.plain(each.mean[at], digits), note))
        rows.append(tuple(cells))
    notes = (
        f"Mean {METRICS[experiment.metric].unit} of the held-out data, and the training time.",
    )
    head = ("tokens", *(each.arm for each in drawn))
    return Table("The metric along the runs", head, tuple(rows), notes, "curve")


def config_table(
    baseline_name: str, baseline: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]
) -> Table:
    """Return every setting of the baseline, and where an arm differs."""
    base = dict(flat(baseline))
    others = {name: dict(flat(values)) for name, values in arms.items()}
    paths = dict.fromkeys((*base, *(path for values in others.values() for path in values)))
    rows = []
    for path in sorted(paths, key=lambda path: path.partition(".")[0]):
        mine = _shown(base, path)
        changed = [
            f"{name}: {_shown(values, path)}"
            for name, values in others.items()
            if _shown(values, path) != mine
        ]
        rows.append((Cell(path), Cell(mine), Cell("; ".join(changed), tone="changed")))
    head = ("setting", baseline_name, "changed in")
    return Table("Every setting", head, tuple(rows), text=True)


def _shown(values: Mapping[str, Any], path: str) -> str:
    return spelled(values[path]) if path in values else "\N{EN DASH}"


def plain_table(
    planned: config.Experiment, verdict: ExperimentVerdict, memory_bytes: int | None
) -> Table | None:
    """Return a step of the arms beside what plain attention would need for it.

    None unless the arms compare kernels and none of them is plain.
    """
    path = "attention.implementation"
    if not any(path in arm.changes for arm in planned.arms):
        return None
    ran = [planned.config_of(arm).attention.implementation for arm in planned.arm_names]
    if "plain" in ran:
        return None
    wanted = need(config.change(planned.baseline, {path: "plain"}))
    rows = [
        (
            Cell("plain", "not run"),
            NONE,
            Cell(words.amount(wanted.total - wanted.process), "estimated", "bad"),
        ),
        _plain_row(verdict.baseline.name, verdict.baseline.measures, withheld=False),
        *(_plain_row(arm.arm, arm.measures, bool(arm.speed_withheld)) for arm in verdict.arms),
    ]
    title = f"One step at context {planned.baseline.model.context:,}"
    head = ("attention", "step", "peak memory")
    return Table(
        title, head, tuple(rows), (_plain_note(planned.baseline, wanted, memory_bytes),), "plain"
    )


def _plain_row(arm: str, measures: ArmMeasures, withheld: bool) -> tuple[Cell, ...]:
    step, memory = measures["step_s"], measures.memory
    time = NONE if step is None else Cell(words.duration(step.mean))
    return (
        Cell(arm),
        Cell("withheld", tone="soft") if withheld else time,
        NONE if memory is None else Cell(words.amount(memory.peak_bytes)),
    )


def _plain_note(run: config.RunConfig, wanted: Need, memory_bytes: int | None) -> str:
    model, batch = run.model, run.training.batch
    context = f"{model.context:,}"
    has = "" if memory_bytes is None else f" This machine has {words.amount(memory_bytes)}."
    return (
        "Plain attention keeps its probabilities for the backward pass: "
        f"{model.layers} layers \N{MULTIPLICATION SIGN} {batch * model.heads} heads "
        f"\N{MULTIPLICATION SIGN} {context} \N{MULTIPLICATION SIGN} {context} numbers, with what "
        f"one layer holds for a moment {words.amount(wanted.matrix)}.{has}"
    )
