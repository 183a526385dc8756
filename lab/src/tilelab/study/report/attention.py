"""Attention along the runs, layer by layer: its largest logit and its entropy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from tilelab.common.svg import arm_colour, finish
from tilelab.study.records.events import LayerSoftmax, RunRecord
from tilelab.study.report.lines import LineEnd, Series, frame, label_ends, line_style
from tilelab.study.report.page import NONE, Cell, Chart, Table
from tilelab.study.report.tables import number_cell
from tilelab.study.verdict import text as words
from tilelab.study.verdict.measures import MEASURES
from tilelab.study.verdict.result import ArmMeasures


class ArmLayers(NamedTuple):
    """The attention layers of an arm along its runs, means over the seeds."""

    arm: str
    place: int  # in its experiment: the colour
    x: tuple[float, ...]  # tokens trained on, at each evaluation
    entropy: tuple[tuple[float, ...], ...]  # of each layer, mean over its heads, nats
    lowest_head: tuple[tuple[float, ...], ...]  # of each layer, that of its lowest head
    logits: tuple[tuple[float, ...], ...]  # the largest of each layer
    broken: bool  # whether a run of the arm diverged


def layers_of(arm: str, place: int, records: Mapping[int, RunRecord]) -> ArmLayers | None:
    """Return the layer statistics of an arm's runs; None where they have none.

    The evaluations are those that every seed has reached, with numbers that are finite in all of
    them.
    """
    runs = [_finite(record) for record in records.values()]
    runs = [each for each in runs if each]
    steps = sorted(set.intersection(*(set(each) for each in runs))) if runs else []
    if not steps:
        return None
    layers = range(len(runs[0][steps[0]][1]))

    def lines(value: Callable[[LayerSoftmax], float | None]) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(
                statistics.fmean(value(run[step][1][layer]) or 0.0 for run in runs)
                for step in steps
            )
            for layer in layers
        )

    return ArmLayers(
        arm,
        place,
        tuple(statistics.fmean(run[step][0] for run in runs) for step in steps),
        lines(lambda each: each.entropy),
        lines(lambda each: each.lowest_head),
        lines(lambda each: each.max_logit),
        any(record.diverged for record in records.values()),
    )


def _finite(record: RunRecord) -> dict[int, tuple[int, list[LayerSoftmax]]]:
    """Step -> tokens and layers of an evaluation whose numbers are all there."""
    return {
        each.step: (each.tokens, each.softmaxes)
        for each in record.evaluations
        if each.softmaxes
        and not any(
            None in (layer.entropy, layer.lowest_head, layer.max_logit) for layer in each.softmaxes
        )
    }


def attention_charts(arms: Sequence[ArmLayers], slug: str) -> Iterator[Chart]:
    """Draw the largest logit and the entropy by tokens, thin for layers and thick for arms."""
    drawn = [each for each in arms if len(each.x) > 1]
    if not drawn:
        return
    over = [_outline(each, each.logits, max) for each in drawn]
    caption = (
        "Thin lines: the largest score of each layer over a few held-out windows, before the "
        "softmax. Thick: the largest of all layers. One that grows without bound ends badly."
    )
    lines = [each.logits for each in drawn]
    title, name = "Largest attention logit", f"{slug}-logits"
    yield Chart(title, _drawn(over, lines, "largest logit", title, name), caption)
    means = [_outline(each, each.entropy, statistics.fmean) for each in drawn]
    caption = (
        "Thin lines: the entropy of each layer's attention, mean over heads and queries of a few "
        "held-out windows. Thick: the mean of the layers. At 0 every query looks at one key."
    )
    lines = [each.entropy for each in drawn]
    title, name = "Entropy of attention", f"{slug}-entropy"
    yield Chart(title, _drawn(means, lines, "nats", title, name), caption)


def _outline(
    each: ArmLayers,
    layers: Sequence[Sequence[float]],
    together: Callable[[Sequence[float]], float],
) -> Series:
    columns = list(zip(*layers, strict=True))
    thick = tuple(together(column) for column in columns)
    low, high = tuple(map(min, columns)), tuple(map(max, columns))
    return Series(each.arm, each.place, each.x, thick, low, high, 1, each.broken)


def _drawn(
    outlines: Sequence[Series],
    layers: Sequence[Sequence[Sequence[float]]],
    unit: str,
    title: str,
    name: str,
) -> Markup:
    summary = f"{title} by training tokens: " + "; ".join(
        f"{each.arm} from {each.mean[0]:.3g} to {each.mean[-1]:.3g}" for each in outlines
    )
    figure, axes = frame(outlines, unit, "training tokens")
    low = min(min(each.low) for each in outlines)
    high = max(max(each.high) for each in outlines)
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    for each, lines in zip(outlines, layers, strict=True):
        colour = arm_colour(each.place)
        for line in lines:
            axes.plot(each.x, line, color=colour, linewidth=0.9, alpha=0.45, zorder=2)
        axes.plot(each.x, each.mean, **line_style(each.place))
    ends = [LineEnd(each.arm, each.place, each.x[-1], each.mean[-1]) for each in outlines]
    label_ends(axes, ends)
    return finish(figure, name, summary)


def attention_table(
    arms: Sequence[ArmLayers], measures: Mapping[str, ArmMeasures], without: Sequence[str]
) -> Table | None:
    """Tabulate every layer at the last evaluation, and the measures of the whole run."""
    if not arms:
        return None
    rows = []
    for layer in range(max(len(each.logits) for each in arms)):
        cells = [_layer(each, layer) if layer < len(each.logits) else NONE for each in arms]
        rows.append((Cell(f"layer {layer}"), *cells))
    whole = [measures[each.arm] for each in arms]
    for measure in MEASURES.values():
        if measure.table == "attention":
            cells = [
                number_cell(each[measure.name], measure.show or words.fixed(3)) for each in whole
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


def _layer(each: ArmLayers, layer: int) -> Cell:
    low, logit = each.lowest_head[layer][-1], each.logits[layer][-1]
    note = f"lowest head {words.plain(low, 2)}, logits up to {words.plain(logit, 2)}"
    return Cell(words.plain(each.entropy[layer][-1], 2), note)
