"""The report: a page and its Markdown twin, made from a study's config and records alone.

Where its parts are made:

- the page as a whole, every chart and table in its order: here (``_experiment``, ``_figures``);
- the sentence above the table of arms: ``verdicts.meaning``;
- the reason beside an arm: ``tilelab/stats/decide.py``;
- the rows of the table of arms: ``verdicts.row_of``, its intervals: ``verdicts.forest_of``; its
  drawing: ``templates/parts.html``, ``report.md``;
- the tables below it: ``tables.evidence_tables``, columns by ``verdict/measures.py``;
- the charts of curves, paired differences and attention's layers: ``lines``;
- the charts of memory, target, survival and cost: ``costs``;
- the charts of effects and sweeps: ``tuning``.

matplotlib draws the charts. ``common/svg.finish`` turns each into an ``<svg>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilewise
from tilelab.common.files import write_atomically
from tilelab.common.svg import house_style
from tilelab.study.ask import config
from tilelab.study.ask.metrics import METRICS
from tilelab.study.ask.run import final_name
from tilelab.study.ask.run_config import parts_used
from tilelab.study.plan import Agenda
from tilelab.study.records.events import RunRecord, Sample
from tilelab.study.records.store import StoredStudy, flat, read_floors, read_study, readable_records
from tilelab.study.report import lines, tables
from tilelab.study.report.costs import memory_chart, pareto_chart, target_charts
from tilelab.study.report.ladders import ladder_of
from tilelab.study.report.page import Chart, Table, html, markdown
from tilelab.study.report.tuning import effects_chart, sweep_chart
from tilelab.study.report.verdicts import answer, baseline_row, forest_of, meaning, row_of
from tilelab.study.verdict import text as words
from tilelab.study.verdict.detect import detected_words
from tilelab.study.verdict.judge import unfolded
from tilelab.study.verdict.measures import learnt
from tilelab.study.verdict.result import StudyVerdict
from tilelab.study.verdict.stages import Stage
from tilewise.commands import visible

__all__ = ["Evidence", "gather", "write"]


@dataclass(frozen=True)
class Evidence:
    """A study, what its runs have written, and what that says."""

    stored: StoredStudy
    records: Mapping[str, RunRecord]  # that can be read, by the run's name
    verdict: StudyVerdict
    folder: Path
    stages: Sequence[Stage]  # its experiments, with those that follow from them
    damaged: Mapping[str, str]  # why the record of a run cannot be read, by the run's name

    def finals(self, experiment: config.Experiment, arm: str) -> dict[int, RunRecord]:
        """Return the runs of an arm that count, by seed; those that have not begun are left out."""
        names = {seed: final_name(experiment, arm, seed) for seed in experiment.seeds}
        return {seed: self.records[name] for seed, name in names.items() if name in self.records}


def gather(folder: Path) -> Evidence:
    """Read a study's folder."""
    stored, (records, damaged) = read_study(folder), readable_records(folder)
    stages, verdict = unfolded(stored.study, records, read_floors(folder))
    return Evidence(stored, records, verdict, folder, stages, damaged)


def write(evidence: Evidence) -> tuple[Path, Path]:
    """Write the page, its Markdown twin and ``verdict.json``; return the paths of the first two."""
    folder, page = evidence.folder, _page(evidence)
    paths = folder / "report.html", folder / "report.md"
    for path, text in zip(paths, (visible(html(page)), visible(markdown(page))), strict=True):
        write_atomically(path, text)
    verdict = json.dumps(evidence.verdict.as_json(), indent=1)
    write_atomically(folder / "verdict.json", verdict + "\n")
    return paths


def _figures(stage: Stage, evidence: Evidence, slug: str) -> tuple[list[Chart], list[Table]]:
    """Return the charts and the tables of an experiment for which there is something to show."""
    planned, verdict = stage
    metric, base = verdict.metric, verdict.baseline.name
    places = {arm: at for at, arm in enumerate(planned.arm_names)}
    runs = {arm: evidence.finals(planned, arm) for arm in places}
    first, *others = places
    withheld = [arm.arm for arm in verdict.arms if arm.speed_withheld]
    by_tokens = [lines.curve(arm, places[arm], runs[arm], metric, "tokens") for arm in places]
    timed = [arm for arm in places if arm not in withheld]
    clock: lines.Abscissa = "processor" if verdict.slowed else "time"
    by_time = [lines.curve(arm, places[arm], runs[arm], metric, clock) for arm in timed]
    gaps = [lines.difference(arm, places[arm], runs[arm], runs[first], metric) for arm in others]
    layers = [found for arm in places if (found := lines.layers_of(arm, places[arm], runs[arm]))]
    time = lines.loss_chart(lines.enough(by_time), clock, metric, f"{slug}-time")
    if time is not None and withheld:
        time = time._replace(caption=f"{time.caption} Withheld: {words.listing(withheld)}.")
    decides = next((each for each in verdict.floors if each.decides), None)
    charts = (
        lines.loss_chart(lines.enough(by_tokens), "tokens", metric, f"{slug}-tokens", decides),
        lines.difference_chart(
            lines.enough(gaps), verdict.smallest_effect, metric, base, f"{slug}-difference"
        ),
        time,
        effects_chart(verdict.effects, metric, f"{slug}-effects"),
        memory_chart(verdict, f"{slug}-memory"),
        *target_charts(verdict, slug),
        pareto_chart(verdict, f"{slug}-pareto"),
        sweep_chart(verdict.sweeps, METRICS[metric].unit, f"{slug}-sweep"),
        *lines.attention_charts(layers, slug),
    )
    with_layers = {each.arm for each in layers}
    measures = {each.name: each.measures for each in verdict.all_arms}
    without = [arm for arm in places if arm not in with_layers]
    shown = (
        tables.plain_table(planned, verdict, evidence.stored.environment.get("memory_bytes")),
        tables.floors_table(verdict, planned),
        *tables.evidence_tables(verdict),
        tables.curve_table(by_tokens, by_time, verdict),
        tables.attention_table(layers, measures, without),
    )
    return [each for each in charts if each], [each for each in shown if each]


_MOST_NAMED = 12  # runs that are missing, by name


def _page(evidence: Evidence) -> dict[str, Any]:
    """Return everything that the templates show, in words and figures, by its name there."""
    stored = evidence.stored
    agenda = Agenda(stored.study, dict(evidence.records))
    left_out = tuple(f"{name}: its record is damaged and left out" for name in evidence.damaged)
    missing = () if evidence.verdict.complete else _missing(agenda, evidence)
    with house_style():
        experiments = tuple(
            _experiment(stage, evidence, f"e{number}")
            for number, stage in enumerate(evidence.stages, 1)
        )
        every = stored.study.experiments
        smallest = {each.name: [each, *each.rungs.values()][-1].smallest_effect for each in every}
        ladders = tuple(
            ladder_of(each, smallest[each.experiment], f"l{number}")
            for number, each in enumerate(evidence.verdict.ladders, 1)
        )
    return {
        "study": stored.study.name,
        "question": stored.study.question,
        "answer": answer(evidence.verdict),
        "status": _status(agenda, evidence),
        "missing": (*left_out, *missing),
        "facts": _facts(agenda, evidence),
        "ladders": ladders,
        "experiments": experiments,
        "environment": (("began", stored.began), *_flat_facts(stored.environment)),
        "corpus": _corpus(evidence),
        "command": stored.command,
        "external": any(each.baseline.learning.external for each in stored.study.experiments),
        "metrics": _metrics_page(evidence.folder),
        "hash": config.config_hash(stored.study),
    }


def _status(agenda: Agenda, evidence: Evidence) -> str:
    if evidence.verdict.complete and not evidence.damaged:
        return ""
    return (
        f"This study is not finished: {agenda.done:,} of {words.count(agenda.total, 'run')} are "
        "over. What follows is what has been seen so far; the command below goes on with it."
    )


def _missing(agenda: Agenda, evidence: Evidence) -> tuple[str, ...]:
    said = []
    ranks = {
        (planned.name, arm): (at, place)
        for at, (planned, _) in enumerate(evidence.stages)
        for place, arm in enumerate(planned.arm_names)
    }
    finals = [run for run in agenda.runs if run.phase == "final"]
    known = [run for run in finals if (run.experiment, run.arm) in ranks]
    for run in sorted(known, key=lambda run: ranks[run.experiment, run.arm]):
        record = evidence.records.get(run.name, RunRecord())
        if record.done or run.name in evidence.damaged:
            continue
        steps = record.steps[-1].step if record.steps else 0
        come = f"{steps:,} steps done" if steps else "not begun"
        if record.missing:
            come = f"{record.missing}, and it will be trained again"
        said.append(f"{run.name}: {come}")
    if len(said) > _MOST_NAMED:
        more = len(said) - _MOST_NAMED
        said[_MOST_NAMED:] = [f"and {words.count(more, 'more run')}".replace("more runs", "more")]
    return tuple(said)


def _facts(agenda: Agenda, evidence: Evidence) -> tuple[tuple[str, str], ...]:
    # Steps that runs share were taken once, and runs that are the same were trained once.
    known = evidence.records
    trained = [each for each in known.values() if each.start.same_as not in known]
    own = [
        (each, [step for step in each.steps if step.step > each.start.shared_steps])
        for each in trained
    ]
    steps = [step for _, taken in own for step in taken]
    tokens = sum(learnt(record, taken) for record, taken in own)
    # What reports no tokens has its steps counted as them: see conduct/script.py.
    external = any(each.baseline.learning.external for each in evidence.stored.study.experiments)
    trained_on = "tokens reported, or else steps" if external else "tokens trained on"
    runs = (
        f"{agenda.done:,}" if evidence.verdict.complete else f"{agenda.done:,} of {agenda.total:,}"
    )
    again = len(evidence.records) - len(trained)
    runs += f", {again:,} of them the same as others" if again else ""
    seeds = {len(planned.seeds) for planned, _ in evidence.stages}
    found = [
        ("runs", runs),
        ("paired seeds", " and ".join(str(number) for number in sorted(seeds))),
        (trained_on, words.shorten(float(f"{tokens:.3g}"))),
        ("CPU time of training", words.duration(sum(step.cpu_s for step in steps))),
    ]
    chip = evidence.stored.environment.get("chip")
    return (*found, ("chip", str(chip))) if chip else tuple(found)


def _same_runs(planned: config.Experiment, evidence: Evidence) -> list[str]:
    """Say which arms have the runs of an experiment before this one: they are no second finding."""
    known: dict[tuple[str, int], str] = {}
    for other, _ in evidence.stages:
        if other == planned:
            break
        for arm in other.arm_names:
            for seed, record in evidence.finals(other, arm).items():
                known.setdefault((record.start.config_hash, seed), f"{arm} in {other.name}")
    found: dict[tuple[str, str], list[int]] = {}
    for arm in planned.arm_names:
        for seed, record in evidence.finals(planned, arm).items():
            there = known.get((record.start.config_hash, seed))
            if there is not None:
                found.setdefault((arm, there), []).append(seed)
    return [
        f"The runs of {arm} here are those of {there} ({words.seeds_text(seeds)}): one "
        "measurement, not a second one."
        for (arm, there), seeds in found.items()
    ]


def _experiment(stage: Stage, evidence: Evidence, slug: str) -> dict[str, Any]:
    planned, verdict = stage
    rows = tuple(row_of(arm, index, verdict, planned) for index, arm in enumerate(verdict.arms, 1))
    charts, shown = _figures(stage, evidence, slug)
    share = f"{verdict.confidence * 100:g} %"
    unit = METRICS[verdict.metric].unit
    wrote, wrote_note = _writings(planned, evidence)
    protocol = (
        f"{words.count(len(planned.seeds), 'seed')}; {_pairing(planned.baseline)} "
        f"Effects are differences of the held-out {unit} with the same seed, with {share} "
        f"intervals; smaller than {verdict.smallest_effect:g} does not matter."
    )
    if verdict.sensitivity is not None:
        protocol += f" {detected_words(planned, verdict, evidence.verdict.correction)}"
    if planned.sequential is not None:
        protocol += f" {_looks(planned, planned.sequential)}"
    return {
        "name": planned.name,
        "slug": slug,
        "question": planned.question,
        "meaning": meaning(verdict),
        "protocol": protocol,
        "unit": unit,
        "confidence": share,
        "baseline": baseline_row(verdict),
        "rows": rows,
        "forest": forest_of(verdict),
        "follows": words.typeset(verdict.follows),
        "notes": (*verdict.notes, *_same_runs(planned, evidence)),
        "charts": charts,
        "tables": shown,
        "writings": wrote,
        "writings_note": wrote_note,
        "config": tables.config_table(
            planned.baseline_name,
            _written_out(planned, planned.baseline_name, evidence),
            {arm.name: _written_out(planned, arm.name, evidence) for arm in planned.arms},
        ),
    }


def _pairing(run: config.RunConfig) -> str:
    if run.learning.external:
        return (
            "every arm gets the same ones, and it is the script that draws weights and batches "
            "from them. Its steps and times are as it reported them, evaluations and its start "
            "included; where it reports no tokens, its steps stand for them."
        )
    return (
        "for a seed every arm starts from the same weights and sees the same batches. The baseline "
        f"trains {words.count(run.steps, 'step')} of {_step(run)}."
    )


def _step(run: config.RunConfig) -> str:
    if run.learning.learns_text:
        return f"{words.integer(run.tokens_per_step)} tokens"
    return words.count(run.training.batch * run.training.accumulation, run.learning.unit)


def _looks(planned: config.Experiment, rule: config.Sequential) -> str:
    alpha = 1 - planned.confidence
    levels = [f"{100 * level:.2g}" for level in rule.levels(alpha)]
    looks = words.listing([str(look) for look in rule.looks])
    return (
        f"Seeds were added until an arm was decided, with looks after {looks} seeds at levels of "
        f"{words.listing(levels)} %, which add up to {100 * alpha:.2g} %; intervals are at those "
        "of the arm's look."
    )


def _writings(
    planned: config.Experiment, evidence: Evidence
) -> tuple[list[tuple[str, Sample]], str]:
    """Return the arms' texts with the seed that most arms have, equal texts together."""
    found: dict[int, dict[str, Sample]] = {}
    for arm in planned.arm_names:
        for seed, record in evidence.finals(planned, arm).items():
            if record.sample is not None:
                found.setdefault(seed, {})[arm] = record.sample
    if not found:
        return [], ""
    seed = max(found, key=lambda each: (len(found[each]), -each))
    arms: dict[Sample, list[str]] = {}
    for arm, sample in found[seed].items():
        arms.setdefault(sample, []).append(arm)
    count = planned.baseline.evaluation.sample_tokens
    note = (
        f"After the last step, seed {seed}: {words.count(count, 'token')} drawn with the same "
        "random numbers in every arm, after the beginning of the held-out text."
    )
    return [(words.listing(names), sample) for sample, names in arms.items()], note


def _written_out(planned: config.Experiment, arm: str, evidence: Evidence) -> Mapping[str, Any]:
    """Return the config that ran, with what a sweep chose; the planned one before it ran."""
    for record in evidence.finals(planned, arm).values():
        return parts_used(record.start.config)
    return parts_used(planned.config_of(arm).model_dump(mode="json"))


def _corpus(evidence: Evidence) -> tuple[tuple[str, str], ...]:
    """Return facts on the training data: one list per different text."""
    seen: dict[str, Mapping[str, Any]] = {}
    for record in evidence.records.values():
        seen.setdefault(json.dumps(record.start.corpus, sort_keys=True), record.start.corpus)
    return tuple(fact for values in seen.values() for fact in _flat_facts(values))


def _flat_facts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, value in flat(values):
        if value not in (None, ""):
            whole = isinstance(value, int) and not isinstance(value, bool)
            name = path.replace("_", " ").replace(".", " ")
            yield name, words.integer(value) if whole else str(value)


def _metrics_page(folder: Path) -> str:
    """Return a link from the report to ``docs/metrics.md`` in the same checkout; else empty."""
    root = Path(tilewise.__file__).resolve().parents[2]
    page, here = root / "docs" / "metrics.md", folder.resolve()
    if not page.exists() or not here.is_relative_to(root):
        return ""
    up = "../" * len(here.relative_to(root).parts)
    return f"{up}docs/metrics.md"
