"""The figures of an experiment, in the order in which the page shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilelab.study.ask import config
from tilelab.study.report.attention import ArmLayers, attention_charts, layers_of
from tilelab.study.report.bars import ArmMemory, ArmTarget, memory_chart, target_chart
from tilelab.study.report.curves import difference_chart, loss_chart
from tilelab.study.report.effects import effects_chart
from tilelab.study.report.gather import Evidence
from tilelab.study.report.pareto import pareto_chart
from tilelab.study.report.series import Series, curve, difference
from tilelab.study.report.survival import survival_chart
from tilelab.study.report.tuned import sweep_chart
from tilelab.study.report.view import Chart
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import ExperimentVerdict
from tilelab.study.verdict.text import UNITS

__all__ = ["Lines", "charts_of", "lines_of"]


class Lines(NamedTuple):
    """The contents of the line figures.

    Args:
        tokens: held-out metric by tokens, the baseline first.
        time: the same by time; arms whose speed is withheld are not in it.
        gaps: every arm less the baseline, by tokens.
        withheld: those arms.
        layers: the attention layers of the arms that have statistics of them.
    """

    tokens: tuple[Series, ...]
    time: tuple[Series, ...]
    gaps: tuple[Series, ...]
    withheld: tuple[str, ...]
    layers: tuple[ArmLayers, ...]


def lines_of(planned: config.Experiment, verdict: ExperimentVerdict, evidence: Evidence) -> Lines:
    """Return the lines of an experiment.

    Args:
        planned: its config.
        verdict: of it.
        evidence: with the records.
    """
    metric = verdict.metric
    runs = [(arm, evidence.finals(planned, arm)) for arm in planned.arm_names]
    withheld = tuple(arm.arm for arm in verdict.arms if arm.speed_withheld)
    (_, base), *others = runs
    return Lines(
        tuple(curve(arm, at, each, metric, "tokens") for at, (arm, each) in enumerate(runs)),
        tuple(
            curve(arm, at, each, metric, "time")
            for at, (arm, each) in enumerate(runs)
            if arm not in withheld
        ),
        tuple(difference(arm, at, each, base, metric) for at, (arm, each) in enumerate(others, 1)),
        withheld,
        tuple(
            each
            for at, (arm, records) in enumerate(runs)
            if (each := layers_of(arm, at, records)) is not None
        ),
    )


def charts_of(verdict: ExperimentVerdict, lines: Lines, slug: str) -> Iterator[Chart]:
    """Return the figures for which there is something to show.

    Args:
        verdict: of the experiment.
        lines: of it.
        slug: unique in the page; begins the figures' names.
    """
    metric, base = verdict.metric, verdict.baseline.name
    time = loss_chart(lines.time, "time", metric, f"{slug}-time")
    if time is not None and lines.withheld:
        held = f" Withheld: {words.listing(list(lines.withheld))}."
        time = time._replace(caption=time.caption + held)
    found = (
        loss_chart(lines.tokens, "tokens", metric, f"{slug}-tokens"),
        difference_chart(lines.gaps, verdict.smallest_effect, metric, base, f"{slug}-difference"),
        time,
        effects_chart(verdict.effects, metric, f"{slug}-effects"),
        _memory(verdict, f"{slug}-memory"),
        *_targets(verdict, slug),
        pareto_chart(verdict, f"{slug}-pareto"),
        sweep_chart(verdict.sweeps, UNITS[metric], f"{slug}-sweep"),
        *attention_charts(lines.layers, slug),
    )
    return (chart for chart in found if chart is not None)


def _memory(verdict: ExperimentVerdict, name: str) -> Chart | None:
    splits = [(verdict.baseline.name, verdict.baseline.measures.memory)]
    splits += [(arm.arm, arm.measures.memory) for arm in verdict.arms]
    known = [
        ArmMemory(arm, at, split) for at, (arm, split) in enumerate(splits) if split is not None
    ]
    return memory_chart(known, name)


def _targets(verdict: ExperimentVerdict, slug: str) -> list[Chart | None]:
    results = [(verdict.baseline.name, verdict.baseline.target)]
    results += [(arm.arm, arm.target) for arm in verdict.arms]
    known = [(arm, at, each) for at, (arm, each) in enumerate(results) if each is not None]
    if not known:
        return []
    said = f"{known[0][2].target:g} {UNITS[verdict.metric]}"
    tokens = [ArmTarget(arm, at, each.tokens) for arm, at, each in known if each.tokens]
    time = [ArmTarget(arm, at, each.wall_s) for arm, at, each in known if each.wall_s]
    return [
        target_chart(tokens, "training tokens", f"Tokens to {said}", said, f"{slug}-target-tokens"),
        target_chart(time, "seconds of training", f"Time to {said}", said, f"{slug}-target-time"),
        survival_chart(verdict, said, f"{slug}-survival"),
    ]
