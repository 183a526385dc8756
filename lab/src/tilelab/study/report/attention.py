"""Attention along the runs, layer by layer: its largest logit and its entropy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tilelab.common.svg import arm_colour, finish
from tilelab.study.records.events import Evaluation, RunRecord
from tilelab.study.report.lines import LineEnd, common, frame, label_ends, line_style
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
    runs = [found for record in records.values() if (found := _finite(record))]
    steps = common(runs)
    if not steps:
        return None

    def lines(name: str) -> tuple[tuple[float, ...], ...]:
        layers = [[run[step].softmaxes or () for run in runs] for step in steps]
        return tuple(
            tuple(statistics.fmean(getattr(run[layer], name) for run in at) for at in layers)
            for layer in range(len(layers[0][0]))
        )

    return ArmLayers(
        arm,
        place,
        tuple(statistics.fmean(run[step].tokens for run in runs) for step in steps),
        lines("entropy"),
        lines("lowest_head"),
        lines("max_logit"),
        any(record.diverged for record in records.values()),
    )


def _finite(record: RunRecord) -> dict[int, Evaluation]:
    """Step -> an evaluation whose statistics are all there."""
    return {
        each.step: each
        for each in record.evaluations
        if each.softmaxes and all(None not in vars(layer).values() for layer in each.softmaxes)
    }


# Title, field of ``ArmLayers``, unit, what the thick line is of the layers, and caption.
_FIGURES: tuple[tuple[str, str, str, Callable[[Sequence[float]], float], str], ...] = (
    (
        *("Largest attention logit", "logits", "largest logit", max),
        "Thin lines: the largest score of each layer over a few held-out windows, before the "
        "softmax. Thick: the largest of all layers. One that grows without bound ends badly.",
    ),
    (
        *("Entropy of attention", "entropy", "nats", statistics.fmean),
        "Thin lines: the entropy of each layer's attention, mean over heads and queries of a few "
        "held-out windows. Thick: the mean of the layers. At 0 every query looks at one key.",
    ),
)


def attention_charts(arms: Sequence[ArmLayers], slug: str) -> Iterator[Chart]:
    """Draw the largest logit and the entropy by tokens, thin for layers and thick for arms."""
    drawn = [each for each in arms if len(each.x) > 3]
    for title, field, unit, together, caption in _FIGURES if drawn else ():
        letters = [len(each.arm) + 2 * each.broken for each in drawn]
        figure, axes = frame(letters, max(each.x[-1] for each in drawn), unit, "training tokens")
        ends, said = [], []
        for each in drawn:
            layers, colour = getattr(each, field), arm_colour(each.place)
            for line in layers:
                axes.plot(each.x, line, color=colour, linewidth=0.9, alpha=0.45, zorder=2)
            thick = [together(column) for column in zip(*layers, strict=True)]
            axes.plot(each.x, thick, **line_style(each.place))
            ends.append(LineEnd(each.arm, each.place, each.x[-1], thick[-1]))
            said.append(f"{each.arm} from {thick[0]:.3g} to {thick[-1]:.3g}")
        low, high = axes.dataLim.intervaly
        margin = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)
        label_ends(axes, ends)
        summary = f"{title} by training tokens: {'; '.join(said)}"
        yield Chart(title, finish(figure, f"{slug}-{field}", summary), caption)


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
