"""Ladders: values on the line through tuned rungs, and effects that the lower rungs foretell.

Effects when the faster of an arm and the baseline ends.
"""

from __future__ import annotations

import math
import random
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.conftest import ROOT
from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    known,
    record_of,
    records_of,
    study_of,
    work,
)
from tilelab.common.svg import house_style
from tilelab.study.ask.config import Arm, Confirm, Experiment, Halving, Ladder, Sweep, change
from tilelab.study.plan import Agenda
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import read_floors, read_records, read_study
from tilelab.study.report.ladders import ladder_of
from tilelab.study.report.verdicts import answer
from tilelab.study.verdict.judge import judge, unfolded
from tilelab.study.verdict.ladder import rates
from tilelab.study.verdict.result import ArmVerdict, LadderVerdict
from tilelab.study.verdict.text import signed
from tilewise.errors import InvalidArgument

WSD = Arm(name="wsd", changes={"schedule.name": "wsd"})
DROP = Arm(name="drop", changes={"model.dropout.residual": 0.1})
STEPS = (10, 20, 40, 80)
SWEEP = Sweep(multiples=(0.5, 1, 2))
RUNGS: dict[str, dict[str, Any]] = {f"{each}": {"budget.steps": each} for each in STEPS}


def laddered(sweep: Sweep | None = SWEEP, **fields: Any) -> Experiment:
    tuned = ("10", "40") if sweep else ()
    ladder = Ladder(**{"rungs": RUNGS, "tuned": tuned, "last": {"drop": "wsd"}, **fields})
    baseline = config_of(**{"optimizer.lr": 2e-3})
    return experiment_of(WSD, DROP, name="length", baseline=baseline, sweep=sweep, ladder=ladder)


def best_at(lower: float, upper: float) -> dict[str, Behaviour]:
    """Trials of every arm are a parabola in log(rate), lowest at these."""
    return {
        f"length.{rung}/{arm}": Behaviour(best=best, noise=0.0)
        for rung, best in (("10", lower), ("40", upper))
        for arm in ("baseline", "wsd")
    }


def chosen(experiment: Experiment, behaviours: dict[str, Behaviour]) -> dict[str, dict[str, Any]]:
    return known(rates(experiment, work(study_of(experiment), behaviours).records))


def test_values_lie_on_the_line_through_the_optima() -> None:
    found = chosen(laddered(), best_at(1.6e-3, 2.4e-3))
    assert [found[rung]["baseline"] for rung in RUNGS] == [1.6e-3, 1.96e-3, 2.4e-3, 2.94e-3]
    assert "drop" not in found["40"]
    assert found["80"]["drop"] == found["80"]["wsd"], "an arm of the last rung takes another's"


def test_a_shared_arm_has_one_value() -> None:
    found = chosen(laddered(shared=("wsd",)), best_at(1.6e-3, 2.4e-3))
    assert {found[rung]["wsd"] for rung in RUNGS} == {1.96e-3}


def test_an_optimum_at_an_edge_is_the_candidate() -> None:
    assert chosen(laddered(), best_at(1e-5, 1e-5))["20"]["baseline"] == 1e-3


def test_a_rung_may_have_multiples_of_its_own() -> None:
    experiment = laddered(multiples={"40": (0.25, 0.5, 1)})
    assert experiment.rungs["10"].candidates("wsd") == (1e-3, 2e-3, 4e-3)
    assert experiment.rungs["40"].candidates("wsd") == (0.5e-3, 1e-3, 2e-3)
    assert chosen(experiment, best_at(1.6e-3, 0.8e-3))["40"]["baseline"] == 0.8e-3


def test_a_rung_may_have_a_spread_and_a_smallest_effect_of_its_own() -> None:
    own: dict[str, Any] = {"spread": {"10": 0.02}, "smallest_effect": {"10": 0.09, "20": 0.001}}
    experiment = laddered(**own)
    smallest = experiment.smallest_effect
    assert [each.spread for each in experiment.rungs.values()] == [0.02, None, None, None]
    found = [each.smallest_effect for each in experiment.rungs.values()]
    assert found == [0.09, smallest, smallest, smallest], "the larger of both"
    raised = change(experiment, {"smallest_effect": 0.1})
    assert {each.smallest_effect for each in raised.rungs.values()} == {0.1}
    assert {each.spread for each in change(laddered(), {"spread": 0.01}).rungs.values()} == {0.01}
    with pytest.raises(InvalidArgument, match=r"ladder.spread.*one of both"):
        change(experiment, {"spread": 0.01})


def test_runs_have_their_rungs_length_and_value() -> None:
    experiment = laddered(shared=("wsd",))
    study = study_of(experiment)
    agenda = work(study, best_at(1.6e-3, 2.4e-3))
    finals = {run.name: run for run in agenda.runs if run.phase == "final"}
    run = finals["length.20/baseline/seed-1"]
    assert (run.config.steps, run.config.optimizer.options["lr"]) == (20, 1.96e-3)
    assert [each.branches for each in finals.values()] == ["/wsd/" in name for name in finals]
    assert "length.40/drop/seed-0" not in finals
    assert len(finals) == 3 * (4 * 2 + 1)
    assert unfolded(study, agenda.records)[1].complete
    trials = [run for run in agenda.runs if run.phase == "sweep"]
    assert {run.experiment for run in trials} == {"length.10", "length.40"}


def test_the_same_runs_after_any_stop() -> None:
    study, behaviours = study_of(laddered()), best_at(1.6e-3, 2.4e-3)
    whole = [run.name for run in work(study, behaviours).runs]
    for most in (0, 5, 11, 20):
        order = random.Random(most)
        part = work(study, behaviours, most=most, order=order).records
        assert len(Agenda(study, part).runs) == len(whole)
        assert [run.name for run in work(study, behaviours, part, order=order).runs] == whole


def test_the_lower_rungs_foretell_the_last() -> None:
    """Losses by a law with the exponent 0.5, and an effect of -0.01 - 3 / sqrt(bytes)."""
    experiment = laddered(sweep=None)
    study, records = study_of(experiment), {}
    for run in Agenda(study, {}).runs:
        read = run.config.steps * run.config.tokens_per_step
        effect = (-0.01 - 3 / read**0.5) if run.arm == "wsd" else 0.0
        final = 1.0 + 40 / read**0.5 + effect + 0.05 * run.seed
        records[run.name] = record_of(run, Behaviour(finals={run.seed: final}))
    (ladder,) = judge(study, records).ladders
    assert (ladder.axis, ladder.places) == ("text", (2560.0, 5120.0, 10240.0, 20480.0))
    assert known(ladder.exponent) == pytest.approx(0.5, abs=1e-4)
    wsd, drop = ladder.arms
    assert wsd.constants == pytest.approx((-0.01, -3.0), rel=1e-3)
    assert wsd.predicted == pytest.approx(-0.01 - 3 / 20480**0.5, abs=1e-6)
    assert known(wsd.miss) == pytest.approx(0.0, abs=1e-6)
    assert [point.rung for point in drop.points] == ["80"]
    assert drop.predicted is None


def timed(pace: float, slower: int = 0) -> dict[str, Any]:
    """Losses -0.1 log(steps) by seed, wsd 0.02 below at equal steps, with so much of the speed.

    The rung of ``slower`` steps ran on a machine that takes three times as long.
    """
    study, records = study_of(laddered(sweep=None)), {}
    for run in Agenda(study, {}).runs:
        wsd = run.arm == "wsd"
        final = 3 - 0.1 * math.log(run.config.steps) + 0.05 * run.seed - 0.02 * wsd
        behaviour = Behaviour(finals={run.seed: final}, pace=pace if wsd else 1.0)
        record = records[run.name] = record_of(run, behaviour)
        last = record.evaluations[-1]
        wall_s = 0.05 * run.config.steps / behaviour.pace
        wall_s *= 3 if run.config.steps == slower else 1
        record.evaluations[-1] = replace(last, train_wall_s=wall_s, train_cpu_s=0.5 * wall_s)
    (ladder,) = judge(study, records).ladders
    return {f"{each.clock} {each.rung}": each for each in ladder.arms[0].equal_time}


def test_effects_at_equal_time() -> None:
    """Half the speed costs 0.1 log(2), of which an arm that is 0.02 better pays back 0.02."""
    same = timed(1.0)
    assert list(same) == [f"{clock} {rung}" for clock in ("cpu", "wall") for rung in RUNGS]
    assert all(each.effect == pytest.approx(-0.02) for each in same.values())
    assert (same["wall 40"].at_s, same["cpu 40"].at_s) == pytest.approx((2.0, 1.0))
    slow = timed(0.6)
    cost = 0.1 * math.log(1 / 0.6)
    assert list(slow) == [
        f"{clock} {rung}" for clock in ("cpu", "wall") for rung in ("20", "40", "80")
    ]
    for each in slow.values():
        assert each.differences == pytest.approx([cost - 0.02] * 3)
        assert known(each.interval).low == pytest.approx(cost - 0.02)
    assert "cpu 80" not in timed(1.5), "after the end of the arm's last rung"
    little = timed(1.04)["cpu 80"]
    assert little.differences == pytest.approx([-0.02] * 3), "its last end, which is against it"
    moved = timed(0.6, slower=40)
    assert moved["cpu 40"].effect == pytest.approx(slow["cpu 40"].effect)
    assert moved["cpu 40"].at_s == pytest.approx(3 * slow["cpu 40"].at_s)
    assert not timed(9.0)


def test_what_the_page_says_of_a_ladder() -> None:
    study, best = study_of(laddered()), best_at(1.6e-3, 2.4e-3)
    lost = best | {"length.40/wsd": Behaviour(survives=0.0)}
    pages, found = [], list[LadderVerdict]()
    for records in ({}, work(study, best).records, work(study, lost).records):
        found += judge(study, records).ladders
        with house_style():
            pages.append(ladder_of(found[-1], 0.02, "l1"))
    before, page, without = pages
    assert before["meaning"] == "Too few rungs are over to say how effects change."
    assert before["charts"] == []
    assert re.fullmatch(
        r"Effects in bits per byte, by bytes of text read: wsd \S+ at 2\.56k and \S+ at 20\.5k\. "
        r"The fit without the last rung foretold it within 0\.02 for 1 of 1 arm\.",
        page["meaning"],
    )
    effects, by_cpu, by_wall, tuned = page["tables"]
    assert effects.head[3:] == ("40 (10.2k)", "80 (20.5k)", "foretold at 80", "missed by", "limit")
    baseline, wsd, drop = ([cell.text for cell in row] for row in effects.rows)
    assert baseline[1:5] == [f"{loss:.4f}" for loss in found[1].losses]
    first, *_ = found[1].arms
    told = (first.points[-1].effect, known(first.predicted), known(first.miss))
    assert wsd[4:7] == [signed(each, 4) for each in told]
    assert (drop[0], drop[1:4], drop[5:]) == ("drop", ["\N{EN DASH}"] * 3, ["\N{EN DASH}"] * 3)
    assert (by_cpu.head[4], by_wall.head[4]) == ("80 (3.9 s)", "80 (4.3 s)")
    assert len(by_cpu.rows) == 1, "an arm of the last rung alone has no line to be read from"
    assert [cell.text for cell in tuned.rows[0][1:]] == ["0.0016", "0.00196", "0.0024", "0.00294"]
    assert [cell.text for cell in without["tables"][-1].rows[1][1:]] == ["diverged"] * 4
    (chart,) = page["charts"]
    assert chart.title == "Effect by bytes of text read"
    assert "wsd from" in chart.svg
    assert "drop from" not in chart.svg
    assert set(re.findall(r"var\(--arm-(\d)\)", chart.svg)) == {"1"}, "the first after the baseline"


def test_noise_widens_what_is_foretold() -> None:
    study = study_of(laddered(sweep=None))
    records = {
        run.name: record_of(run, Behaviour(noise=0.02, effect=4 / run.config.steps))
        for run in Agenda(study, {}).runs
    }
    (ladder,) = judge(study, records).ladders
    interval = known(ladder.arms[0].predicted_interval)
    assert 0.005 < interval.high - interval.low < 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tuned": ("7",)}, "ladder.tuned"),
        ({"shared": ("lion",)}, "ladder.shared"),
        ({"last": {"baseline": "wsd"}}, "ladder.last"),
        ({"multiples": {"20": (1, 2)}}, "ladder.multiples.*of the tuned rungs"),
        ({"spread": {"7": 0.1}}, "ladder.spread"),
        ({"spread": {"10": 0.0}}, "greater than 0"),
        ({"smallest_effect": {"7": 0.1}}, "ladder.smallest_effect"),
        ({"tuned": ()}, "rungs that are tuned need the sweep"),
        ({"rungs": {"a": {"budget.steps": 4}, "b": {"budget.steps": 2}}}, "the smallest first"),
        ({"rungs": {"a": {"schedule.name": "wsd"}, "b": {}}}, "no path that the rungs change"),
    ],
)
def test_a_ladder_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    if "rungs" in changes:
        changes = {"tuned": ("a", "b"), **changes}
    with pytest.raises(ValidationError, match=words):
        laddered(**changes)


def test_a_ladder_stands_alone() -> None:
    with pytest.raises(ValidationError, match="a ladder and confirm"):
        experiment_of(WSD, ladder=Ladder(rungs=RUNGS), confirm=Confirm(seeds=(7,)))
    with pytest.raises(ValidationError, match="a ladder with halving"):
        laddered(Sweep(multiples=(0.5, 1, 2), halving=Halving(rungs=2)))


SLOW = {"optimizers/lion": Behaviour(pace=0.5)}


def curved(
    experiment: Experiment, behaviours: Any = SLOW, at_s: float = 1.0
) -> dict[str, RunRecord]:
    """Records whose metric after 0, 10, 20, 30 and 40 steps of a time is 8, 6, 4, 3 and 2."""
    records = records_of(study_of(experiment), behaviours)
    for at, record in enumerate(records.values()):
        pace = 2.0 if "/lion/" in record.start.run else 1.0
        jitter = at_s + at * 1e-4
        record.evaluations = [
            replace(
                each,
                bits_per_byte=value,
                train_cpu_s=jitter * pace * each.step,
                train_wall_s=7.0 * jitter * pace * each.step,
            )
            for each, value in zip(record.evaluations, (8.0, 6.0, 4.0, 3.0, 2.0), strict=True)
        ]
    return records


def arm_of(experiment: Experiment, records: dict[str, RunRecord]) -> ArmVerdict:
    return judge(study_of(experiment), records).experiments[0].arms[0]


def test_the_slower_one_is_read_at_the_end_of_the_faster_one() -> None:
    experiment = experiment_of("lion")
    arm = arm_of(experiment, curved(experiment))
    found = known(arm.equal_time)
    # After 40 s lion has taken 20 of its steps, and has 4 bits per byte where the baseline has 2.
    assert (found.rung, found.clock) == ("", "cpu")
    assert found.at_s == pytest.approx(40, rel=1e-3)
    assert found.effect == pytest.approx(2, abs=1e-2)
    assert len(found.differences) == 3
    assert "At equal processor time, the 40.0 s of baseline: +2.0" in arm.notes[-1]
    assert "The schedule of lion had not ended by then, which is against it." in arm.notes[-1]
    # After 50 s it is half-way between two evaluations.
    records = curved(experiment)
    for name, record in records.items():
        if "/lion/" in name:
            continue
        record.evaluations = [
            replace(each, train_cpu_s=1.25 * each.train_cpu_s) for each in record.evaluations
        ]
    assert known(arm_of(experiment, records).equal_time).effect == pytest.approx(1.5, abs=1e-2)
    # Several threads: wall time.
    records = curved(experiment)
    for record in records.values():
        where = {**record.start.environment, "threads": 2}
        record.starts = [replace(record.start, environment=where)]
    arm = arm_of(experiment, records)
    assert known(arm.equal_time).clock == "wall"
    assert "At equal wall time" in arm.notes[-1]


def test_there_is_none_where_both_take_as_long_or_a_seed_is_missing() -> None:
    experiment = experiment_of("wsd")
    arm = arm_of(experiment, curved(experiment))
    assert arm.equal_time is None
    assert not any("equal" in note for note in arm.notes)
    experiment = experiment_of("lion")
    records = curved(experiment)
    del records["optimizers/lion/seed-1"]
    assert arm_of(experiment, records).equal_time is None
    systems = experiment_of(Arm(name="lion", kind="systems"))
    assert arm_of(systems, curved(systems)).equal_time is None
    rungs = {str(steps): {"budget.steps": steps} for steps in (20, 40)}
    ladder = experiment_of("lion", ladder=Ladder(rungs=rungs))
    verdict = judge(study_of(ladder), {})
    assert [arm.equal_time for each in verdict.experiments for arm in each.arms] == [None, None]


def test_an_end_that_scores_all_of_the_text_counts_by_the_windows_of_the_others() -> None:
    whole = experiment_of("lion", baseline=config_of(**{"evaluation.final_stride": 32}))
    records = curved(whole)
    assert arm_of(whole, records).equal_time is None, "older records do not have them"
    for record in records.values():
        last = replace(record.evaluations[-1], on_windows={"bits_per_byte": 2.5})
        record.evaluations[-1] = last
    assert known(arm_of(whole, records).equal_time).effect == pytest.approx(1.5, abs=1e-2)


def answered(behaviours: dict[str, Behaviour], without: str = "") -> str:
    """The first sentence of the report on a ladder, beside an experiment that is none.

    ``without`` is a run that has no record.
    """
    experiment = laddered(None, last={}, rungs={each: RUNGS[each] for each in ("10", "20", "40")})
    study = study_of(experiment, experiment_of("lion", name="precision"))
    told = {"precision/lion": Behaviour(effect=-0.9)}
    told |= {f"length.{name}": each for name, each in behaviours.items()}
    records = work(study, told).records
    return answer(judge(study, {name: records[name] for name in records if name != without}))


def test_a_ladder_answers_by_its_ends_and_by_the_signs_of_its_effects() -> None:
    gain, loss = Behaviour(effect=-0.2), Behaviour(effect=0.2)
    same = answered({"10/wsd": gain, "10/drop": loss, "40/wsd": gain, "40/drop": loss})
    assert re.fullmatch(
        r"By bytes of text read, wsd leads at [\d.]+k \(by 0\.\d+ bits per byte\) and at [\d.]+k "
        r"\(by 0\.\d+ bits per byte\); no arm's effect is shown to change its sign\.",
        same,
    ), same
    turned = answered({"10/wsd": gain, "20/drop": loss, "40/wsd": loss, "40/drop": loss})
    assert re.fullmatch(
        r"By bytes of text read, wsd leads at ([\d.]+k) \(by .*\), baseline at ([\d.]+k) "
        r"\(the baseline\); wsd is better at \1 and worse at \2\.",
        turned,
    ), turned
    wide = Behaviour(finals={0: 1.0, 1: 4.0, 2: 1.0})
    assert "bits per byte, undecided)" in answered({"40/wsd": wide, "40/drop": loss})
    assert not answered({"10/wsd": gain}, "length.40/wsd/seed-1"), "not before all rungs are over"


@pytest.mark.parametrize("name", ["ladder", "wikitext"])
def test_the_stored_reports_begin_with_the_answer(name: str, tmp_path: Path) -> None:
    folder = ROOT / "benchmarks/studies" / name
    with tarfile.open(folder / "records.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    study, records = read_study(folder).study, read_records(tmp_path)
    found = answer(judge(study, records, read_floors(folder)))
    assert (folder / "report.md").read_text().splitlines()[2] == f"**{found}**"
