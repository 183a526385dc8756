"""The judge: from the records of a study to its verdicts. Nothing but the records is believed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilelab.stats import decide
from tilelab.stats.factorial import factor_effects, interactions
from tilelab.stats.paired import (
    ALWAYS_THE_SAME,
    SAME_WITH_EVERY_SEED,
    constant,
    critical_t,
    paired,
    ratio,
)
from tilelab.study.ask.config import Arm, Experiment, Study
from tilelab.study.ask.metrics import METRICS, Floor
from tilelab.study.ask.run import final_name
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import Floors
from tilelab.study.verdict import caveats, measures
from tilelab.study.verdict.clocks import at_first_end, speed_of
from tilelab.study.verdict.detect import Families, Family, alone, apart, families_of, sensitivity
from tilelab.study.verdict.ladder import climb, rates
from tilelab.study.verdict.measures import Values
from tilelab.study.verdict.result import (
    ArmMeasures,
    ArmVerdict,
    Baseline,
    Cost,
    ExperimentVerdict,
    FactorEffect,
    Ratio,
    SeedResult,
    Sensitivity,
    Status,
    StudyVerdict,
    SweepResult,
)
from tilelab.study.verdict.stages import Stage, following, over
from tilelab.study.verdict.sweeps import all_diverged, rungs_of, sweep_results

NO_FLOORS: Floors = {}
# What a cost and a target say where speed is withheld.
_NO_TIMES: Mapping[str, Any] = dict.fromkeys(("wall_s", "cpu_s", "sweep_wall_s", "sweep_cpu_s"))
_NO_TARGET_TIMES: Mapping[str, Any] = {
    "wall_s": (),
    "cpu_s": (),
    **dict.fromkeys(("median_wall_s", "median_cpu_s", "wall_ratio")),
}


def judge(
    study: Study, records: Mapping[str, RunRecord], floors: Floors = NO_FLOORS
) -> StudyVerdict:
    """Return the verdicts of a study, by the records so far (by ``RunSpec.name``)."""
    return unfolded(study, records, floors)[1]


def unfolded(
    study: Study, records: Mapping[str, RunRecord], floors: Floors = NO_FLOORS
) -> tuple[list[Stage], StudyVerdict]:
    """Return the experiments of a study with the stages that follow, and the whole verdict."""
    families = _families(study, records)
    found = {each.name: stages_of(each, records, families, floors) for each in study.experiments}
    stages = [stage for each in found.values() for stage in each]
    verdicts = tuple(each.verdict for each in stages)
    whole = all(map(over, verdicts))
    ladders = tuple(
        climb(each, [stage.verdict for stage in found[each.name]], records)
        for each in study.experiments
        if each.ladder is not None
    )
    judged = StudyVerdict(
        study.name, study.question, whole, verdicts, ladders, correction=study.correction
    )
    return stages, judged


def _families(study: Study, records: Mapping[str, RunRecord]) -> Families:
    """Return the families, with the p-values of those comparisons that step down together."""
    families = families_of(study)
    if study.correction == "experiment":
        return families
    tests: dict[str, list[decide.Judged]] = {}
    for experiment in study.experiments:
        if apart(experiment):
            continue
        for planned, lost in _parts(experiment, records):
            sweeps = sweep_results(planned, records)
            judged = _compared_all(planned, records, sweeps, alone(planned), lost)[1]
            tests[planned.name] = _tested(planned, judged)
    size = max((families[name].size for name in tests), default=0)  # they share one family
    for name, others in decide.others_of(tests, size - sum(map(len, tests.values()))).items():
        families[name] = families[name]._replace(others=others)
    return families


def _tested(experiment: Experiment, judged: Sequence[decide.Judged]) -> list[decide.Judged]:
    """Return the decisions without those on controls."""
    arms = zip(experiment.arms, judged, strict=True)
    return [each for arm, each in arms if arm.kind != "control"]


def _parts(
    experiment: Experiment, records: Mapping[str, RunRecord]
) -> list[tuple[Experiment, frozenset[str]]]:
    """Return an experiment, or the rungs of its ladder; each with arms that have no runs."""
    if experiment.ladder is None:
        return [(experiment, frozenset())]
    tuned = rates(experiment, records) or {}
    lost = {
        rung: frozenset(arm for arm, value in values.items() if value is None)
        for rung, values in tuned.items()
    }
    return [(each, lost.get(name, frozenset())) for name, each in experiment.rungs.items()]


def stages_of(
    experiment: Experiment,
    records: Mapping[str, RunRecord],
    families: Families,
    floors: Floors = NO_FLOORS,
) -> list[Stage]:
    """Return an experiment, and those that follow by its rules, as far as the records tell.

    A ladder becomes its rungs. ``families`` are those of its study.
    """

    def stage(planned: Experiment, lost: Collection[str] = ()) -> Stage:
        known = floors.get(planned.name, ())
        found = _experiment(planned, records, known, families[planned.name], lost)
        if experiment.ladder is None:  # which has ends of its own at several times
            found = replace(found, arms=tuple(_timed(planned, arm, records) for arm in found.arms))
        return Stage(planned, found)

    if experiment.ladder is not None:
        return [stage(*each) for each in _parts(experiment, records)]
    found = [stage(experiment)]
    while True:
        last, (after, words) = found[-1], following(found)
        found[-1] = last._replace(verdict=replace(last.verdict, follows=words))
        if after is None:
            return found
        found.append(stage(after))


@dataclass(frozen=True)
class _Runs:
    finals: Mapping[int, RunRecord]  # seed -> record, an empty one where there is none
    trials: Sequence[RunRecord]  # of its sweep
    lost: bool  # every value of the sweep diverged: there are no finals

    @cached_property
    def values(self) -> dict[int, Values]:
        return {seed: measures.measure(record) for seed, record in self.finals.items()}

    @cached_property
    def measures(self) -> ArmMeasures:
        over = measures.over_seeds(list(self.values.values()))
        return replace(over, kernels=caveats.kernel_uses(self.finals.values()))

    @property
    def cost(self) -> Cost:
        return measures.cost([*self.trials, *self.finals.values()])


def wanted_seeds(
    experiment: Experiment, records: Mapping[str, RunRecord], family: Family
) -> dict[str, tuple[int, ...]]:
    """Arm -> the seeds that it has to have run by now; a sequential one may want more later."""
    _, judged = _compared_all(experiment, records, sweep_results(experiment, records), family)
    return _seeds_of(experiment, judged)


def _seeds_of(
    experiment: Experiment, judged: Sequence[decide.Judged]
) -> dict[str, tuple[int, ...]]:
    """Arm -> the seeds that are compared; of the baseline those of any arm."""
    seeds = {
        arm.name: tuple(each.seed for each in found.compared.seeds)
        for arm, found in zip(experiment.arms, judged, strict=True)
    }
    longest = max(seeds.values(), key=len, default=experiment.seeds)
    return {experiment.baseline_name: longest, **seeds}


def _compared_all(
    experiment: Experiment,
    records: Mapping[str, RunRecord],
    sweeps: Sequence[SweepResult],
    family: Family,
    lost: Collection[str] = (),
) -> tuple[dict[str, _Runs], list[decide.Judged]]:
    """Return the runs of every arm, and the decisions; of a sequential experiment look by look."""
    gone = {each.arm for each in sweeps if all_diverged(each)}.union(lost)
    runs = {name: _runs(experiment, name, records, name in gone) for name in experiment.arm_names}
    baseline = runs[experiment.baseline_name]
    compared = [_compared(experiment, arm, runs[arm.name], baseline) for arm in experiment.arms]
    # Controls are no findings: they are in no family with the other arms.
    controls = [arm.kind == "control" for arm in experiment.arms]
    tested = [each for each, control in zip(compared, controls, strict=True) if not control]
    others = [each for each, control in zip(compared, controls, strict=True) if control]
    if experiment.design is not None:  # its arms are adjusted among themselves
        family = Family(len(tested))
    rules, rule = rules_of(experiment, max(family.size, 1)), experiment.sequential
    if rule is not None:
        further, levels = family.size - len(tested), rule.levels(rules.alpha)
        found = decide.look_by_look(tested, rules, rule.looks, levels, further)
    else:
        found = decide.decided(tested, rules, family.others)
    known = decide.decided(others, rules_of(experiment))
    judged = [(known if control else found).pop(0) for control in controls]
    return runs, judged


def rules_of(experiment: Experiment, family: int = 1) -> decide.Rules:
    """Return the rules by which an experiment decides so many comparisons together."""
    metric = METRICS[experiment.metric]
    return decide.Rules(
        unit=metric.unit,
        smallest=experiment.smallest_effect,
        confidence=experiment.confidence,
        power=experiment.power,
        family=family,
        higher_is_better=metric.higher_is_better,
        error=experiment.error,
    )


def _experiment(
    experiment: Experiment,
    records: Mapping[str, RunRecord],
    floors: Sequence[Floor],
    family: Family,
    lost: Collection[str],
) -> ExperimentVerdict:
    """Return the verdict; ``lost`` arms have no runs: trials of another rung diverged."""
    sweeps = sweep_results(experiment, records)
    runs, judged = _compared_all(experiment, records, sweeps, family, lost)
    if experiment.sequential is not None:  # without seeds that no look needs
        needed = {
            name: {seed: runs[name].finals[seed] for seed in seeds}
            for name, seeds in _seeds_of(experiment, judged).items()
        }
        runs = {name: replace(each, finals=needed[name]) for name, each in runs.items()}
    baseline = runs[experiment.baseline_name]
    finals = {name: each.finals for name, each in runs.items()}
    arms = tuple(
        _arm(experiment, arm, runs, finals, each)
        for arm, each in zip(experiment.arms, judged, strict=True)
    )
    shown = _baseline(experiment, baseline)
    per_seed = {arm.arm: arm.per_seed for arm in arms}
    broken = bool(shown.diverged)
    # A design has its own effects, and arms with other numbers of seeds have no contrasts.
    design, seeds, rules = experiment.design, experiment.seeds, rules_of(experiment)
    separate = design is not None or experiment.sequential is not None
    count = family.interactions
    both = len(family.others.different), count
    effects = () if design is None else factor_effects(design, per_seed, seeds, rules, broken, both)
    verdict = ExperimentVerdict(
        experiment=experiment.name,
        question=experiment.question,
        metric=experiment.metric,
        smallest_effect=experiment.smallest_effect,
        confidence=experiment.confidence,
        baseline=shown,
        arms=arms,
        interactions=() if separate else interactions(per_seed, seeds, rules, broken, count),
        sweeps=sweeps,
        notes=(
            *caveats.experiment_notes(
                experiment, finals, [each.measures for each in runs.values()]
            ),
            *caveats.control_notes(experiment, arms),
        ),
        effects=effects,
        sensitivity=_sensitivity(experiment, family, _tested(experiment, judged), effects),
        error=judged[0].error if judged else None,
    )
    return caveats.with_floors(verdict, floors, _same_text(experiment, finals))


def _sensitivity(
    experiment: Experiment,
    family: Family,
    judged: Sequence[decide.Judged],
    effects: Sequence[FactorEffect],
) -> Sensitivity | None:
    """Return what the experiment could detect, with the spread that its runs have shown."""
    if not judged:
        return None
    error = judged[0].error
    if experiment.design is not None:
        seeds = len(experiment.seeds)
        scale = math.sqrt(seeds) / critical_t(seeds, 1, 1 - experiment.confidence)
        ends = [each.interval for each in effects if len(each.factors) == 1]
        spreads = [(each.high - each.low) / 2 * scale for each in ends if each is not None]
        return sensitivity(experiment, family, spreads, pooled=False)
    if error is not None and error.kind == "pooled":
        assert error.spread is not None
        return sensitivity(experiment, family, [error.spread], pooled=True)
    own = [paired(each.compared.differences, experiment.confidence).spread for each in judged]
    spreads = [each for each in own if each is not None]
    return sensitivity(experiment, family, spreads, pooled=False)


def _same_text(
    experiment: Experiment, finals: Mapping[str, Mapping[int, RunRecord]]
) -> frozenset[str]:
    """Return the arms whose data is the baseline's."""
    hashes = {
        name: {start.corpus.get("sha256") for record in runs.values() for start in record.starts}
        for name, runs in finals.items()
    }
    own = hashes[experiment.baseline_name]
    return frozenset(name for name, found in hashes.items() if found <= own)


def _runs(
    experiment: Experiment,
    arm: str,
    records: Mapping[str, RunRecord],
    lost: bool,
) -> _Runs:
    finals = _finals(experiment, arm, experiment.seeds_of(arm), records)
    tried = [
        records.get(run.name, RunRecord())
        for rung in rungs_of(experiment, arm, records)
        for runs in rung.runs.values()
        for run in runs
    ]
    return _Runs(finals, tried, lost)


def _finals(
    experiment: Experiment, arm: str, seeds: Sequence[int], records: Mapping[str, RunRecord]
) -> dict[int, RunRecord]:
    return {seed: records.get(final_name(experiment, arm, seed), RunRecord()) for seed in seeds}


def _status(experiment: Experiment, runs: _Runs, seed: int) -> Status:
    return "diverged" if runs.lost else measures.status(runs.finals[seed], experiment.metric)


def _compared(experiment: Experiment, arm: Arm, runs: _Runs, baseline: _Runs) -> decide.Comparison:
    seeds = tuple(_seed(experiment, runs, baseline, seed) for seed in runs.finals)
    diverged = [seed for seed in runs.finals if _status(experiment, baseline, seed) == "diverged"]
    return decide.Comparison(
        "training" if arm.kind == "training" else "systems", seeds, diverged, runs.lost
    )


def _seed(experiment: Experiment, runs: _Runs, baseline: _Runs, seed: int) -> SeedResult:
    mine, theirs = runs.finals[seed], baseline.finals[seed]
    metric = measures.final_metric(mine, experiment.metric)
    other = measures.final_metric(theirs, experiment.metric)
    difference = None if metric is None or other is None else metric - other
    same = mine.weights_sha256 == theirs.weights_sha256 != ""  # of a script nobody knows
    return SeedResult(
        seed=seed,
        status=_status(experiment, runs, seed),
        metric=metric,
        baseline=other,
        difference=difference,
        identical=difference is not None and same,
    )


def _arm(
    experiment: Experiment,
    arm: Arm,
    all_runs: Mapping[str, _Runs],
    finals: Mapping[str, Mapping[int, RunRecord]],
    judged: decide.Judged,
) -> ArmVerdict:
    compared, test, decision = judged[:3]
    runs, baseline = all_runs[arm.name], all_runs[experiment.baseline_name]
    withheld = _withheld(arm, decision)
    target = measures.target_result(experiment, runs.finals, baseline.finals)
    if withheld and target is not None:
        target = replace(target, **_NO_TARGET_TIMES)
    notes = caveats.pairing_note(runs.finals, baseline.finals)
    notes += caveats.held_out_note(experiment, arm)
    agrees, drift = caveats.rounding(experiment, arm, finals)
    notes += (drift,) if drift else ()
    if compared.whole and constant(test.paired):
        notes += (SAME_WITH_EVERY_SEED,)
    unchanged = len(compared.seeds) > 1 and set(compared.differences) == {0.0}
    if compared.whole and unchanged and arm.kind == "training" and not compared.identical:
        notes += (ALWAYS_THE_SAME,)
    found = _measures(experiment, runs, baseline, bool(withheld))
    known = (each for of in finals.values() for each in of.values() if each.starts)
    return ArmVerdict(
        **vars(judged.verdict(arm.name)),
        kind=arm.kind,
        kernel_flags=caveats.kernel_flags(
            experiment, arm.name, runs.measures.kernels, baseline.measures.kernels
        ),
        speed_withheld=withheld,
        speed=speed_of(found, all(each.one_thread for each in known)),
        measures=found,
        cost=replace(runs.cost, **_NO_TIMES) if withheld else runs.cost,
        target=target,
        notes=notes,
        agrees=agrees,
    )


def _timed(experiment: Experiment, arm: ArmVerdict, records: Mapping[str, RunRecord]) -> ArmVerdict:
    """Return the verdict on a training arm with its effect at equal time, where that is another."""
    seeds = [each.seed for each in arm.per_seed]
    names = arm.arm, experiment.baseline_name
    mine, base = (_finals(experiment, name, seeds, records) for name in names)
    found = at_first_end(experiment, arm.arm, mine, base) if arm.kind == "training" else None
    if found is None:
        return arm
    return replace(arm, equal_time=found[0], notes=(*arm.notes, found[1]))


def _withheld(arm: Arm, decision: decide.Decision) -> str:
    """Why the speed of a systems arm is not reported; empty where it is."""
    if arm.kind == "control":
        return "A control computes something wrong on purpose: its speed says nothing."
    if arm.kind != "systems" or decision.label == "no difference":
        return ""
    return (
        "A systems arm has to be shown to change nothing of what is learnt before its speed "
        f"counts: this one is {decision.label}."
    )


def _measures(experiment: Experiment, runs: _Runs, baseline: _Runs, withheld: bool) -> ArmMeasures:
    """Return the measures of an arm with their ratios; without times where speed is withheld."""
    hidden = measures.TIMES if withheld else frozenset()

    def of(name: str) -> Ratio | None:
        values = [
            (runs.values[seed].get(name), baseline.values[seed].get(name))
            for seed in runs.values
            if seed in baseline.values and name not in hidden
        ]
        pairs = [(ours, other) for ours, other in values if ours is not None and other is not None]
        return ratio(pairs, experiment.confidence)

    found = runs.measures.summaries
    return replace(
        runs.measures,
        summaries={name: None if name in hidden else each for name, each in found.items()},
        speed_ratio=of("tokens_per_s"),
        cpu_ratio=of("tokens_per_cpu_s"),
        memory_ratio=of("peak_bytes"),
        activations_ratio=of("activations_bytes"),
    )


def _baseline(experiment: Experiment, runs: _Runs) -> Baseline:
    states = {seed: _status(experiment, runs, seed) for seed in runs.finals}
    diverged = tuple(seed for seed, state in states.items() if state == "diverged")
    incomplete = tuple(seed for seed, state in states.items() if state == "incomplete")
    return Baseline(
        name=experiment.baseline_name,
        status="incomplete" if incomplete else "diverged" if diverged else "done",
        n=len(states) - len(diverged) - len(incomplete),
        diverged=diverged,
        incomplete=incomplete,
        measures=runs.measures,
        cost=runs.cost,
        target=measures.target_result(experiment, runs.finals),
    )
