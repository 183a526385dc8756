"""Floors beside a verdict: arms that have not learnt are named, and no label changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of
from tilelab.study.ask.metrics import Floor
from tilelab.study.report.page import NONE
from tilelab.study.report.tables import floors_table
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import ExperimentVerdict

TABLES = (
    Floor("gzip -9", "none", 0, 2.9),
    *(Floor(f"byte table of order {k}", "seen", 9000, 3.0 - 0.2 * k) for k in (1, 2, 3, 4)),
    Floor("byte table of order 4", "all", 90_000, 1.5),
    Floor("xz -9e", "all", 90_000, 1.4),
)


def judged(
    lion: float, base: float, floors: tuple[Floor, ...] = TABLES, metric: str = "bits_per_byte"
) -> ExperimentVerdict:
    """The verdict on arms that end at these values, nearly the same with every seed."""
    unit = 1.0 if metric == "bits_per_byte" else math.log(2)

    def ends(value: float) -> Behaviour:
        return Behaviour(finals={seed: (value + 1e-3 * seed) * unit for seed in (0, 1, 2)})

    study = study_of(experiment_of("lion", metric=metric))
    records = records_of(study, {"lion": ends(lion), "baseline": ends(base)})
    return judge(study, records, {"optimizers": floors}).experiments[0]


def test_word_perplexities_stand_beside_that_of_gpt2() -> None:
    study = study_of(experiment_of("lion"))
    ends = {"lion": 0.8, "baseline": 1.4}  # bits per byte: 9 and 49 a word of 4
    records = records_of(
        study,
        {
            arm: Behaviour(finals=dict.fromkeys((0, 1, 2), at), word_perplexity=True)
            for arm, at in ends.items()
        },
    )
    floors = tuple(replace(each, word_perplexity=90.0) for each in TABLES)
    table = floors_table(
        judge(study, records, {"optimizers": floors}).experiments[0], study.experiments[0]
    )
    assert table is not None
    assert table.head[2] == "bits per byte"
    assert not any(row[2].note for row in table.rows)
    assert [cell.text for cell in table.rows[-1]] == [
        "GPT-2, 124 million parameters", "40 GB of web text", NONE.text, "37.5", "lion"
    ]  # fmt: skip


def test_without_floors_nothing_is_said() -> None:
    verdict = judged(2.3, 2.3, ())
    assert verdict.floors == ()
    assert verdict.notes == ()
    assert verdict.baseline.learnt is verdict.arms[0].learnt is None


@pytest.mark.parametrize("metric", ["bits_per_byte", "loss"])
def test_two_arms_that_have_not_learnt_are_more_than_no_difference(metric: str) -> None:
    verdict, plain = (judged(2.31, 2.31, floors, metric) for floors in (TABLES, ()))
    arm, (without,) = verdict.arms[0], plain.arms
    assert arm.label == without.label == "no difference"
    assert arm.reason == f"{without.reason} Neither it nor baseline has learnt more than the " + (
        "byte table of order 4 (2.200 bits per byte)."
    )
    assert (arm.learnt, arm.neither_learnt, verdict.baseline.learnt) == (False, True, False)
    numbers: dict[str, Any] = {"reason": "", "learnt": None, "neither_learnt": False}
    assert replace(arm, **numbers) == replace(without, **numbers), "no number changes"
    (note,) = verdict.notes
    assert note == (
        "baseline ends at 2.311 bits per byte: no better than the byte table of order 4 of the "
        "text that was seen (2.200), so it has not learnt more than counts."
    )
    worse = judged(2.7, 2.7, TABLES, metric).notes[0]
    assert "no better than the byte table of order 2 of the text that was seen (2.600)" in worse


def test_arms_that_have_learnt_are_not_named() -> None:
    verdict = judged(1.9, 2.0)
    assert (verdict.baseline.learnt, verdict.arms[0].learnt) == (True, True)
    assert not verdict.arms[0].neither_learnt
    assert "learnt" not in verdict.arms[0].reason + " ".join(verdict.arms[0].notes)
    (note,) = verdict.notes
    assert note == (
        "baseline ends at 2.001 bits per byte, better than the byte table of order 4 of the text "
        "that was seen (2.200) and no better than the byte table of order 4 of all training text "
        "(1.500)."
    )
    beaten = {(each.name, each.text): each.beaten_by for each in verdict.floors}
    assert beaten["byte table of order 4", "seen"] == ("baseline", "lion")
    assert beaten["xz -9e", "all"] == ()
    assert [each.decides for each in verdict.floors].count(True) == 1
    assert judged(2.1, 2.3).floors[4].beaten_by == ("lion",)


def test_an_arm_alone_that_has_not_learnt_has_a_note() -> None:
    verdict = judged(2.5, 2.0)
    arm = verdict.arms[0]
    assert (arm.label, arm.learnt, arm.neither_learnt) == ("worse", False, False)
    assert arm.notes[-1] == (
        "Not learnt: it ends at 2.501 bits per byte, and the byte table of order 4 of the text "
        "that was seen scores 2.200."
    )
    assert verdict.notes[0].endswith("(2.200): lion.")
    better = judged(2.0, 2.5).arms[0]
    assert "earnt" not in better.reason + " ".join(better.notes)


def test_an_arm_of_another_text_is_not_compared_with_the_floors() -> None:
    study = study_of(experiment_of("lion"))
    records = records_of(study, {"lion": Behaviour(effect=2.0)})
    for name, record in records.items():
        if "/lion/" in name:
            record.starts = [replace(each, corpus={"sha256": "1"}) for each in record.starts]
    arm = judge(study, records, {"optimizers": TABLES}).experiments[0].arms[0]
    assert arm.learnt is None
    assert not any("Not learnt" in note for note in arm.notes)


def test_classes_have_the_constant_answer() -> None:
    floors = (
        Floor("majority answer", "none", 0, 0.9, "accuracy"),
        Floor("majority answer", "none", 0, 0.5, "cross_entropy"),
    )

    study = study_of(experiment_of("lion"))

    def verdict(loss: float) -> ExperimentVerdict:
        behaviours = Behaviour(finals=dict.fromkeys((0, 1, 2), loss), metric="accuracy")
        records = records_of(study, {"lion": behaviours, "baseline": behaviours})
        told = study.experiments[0].model_copy(update={"metric": "accuracy"})
        changed = study.model_copy(update={"experiments": (told,)})
        return judge(changed, records, {told.name: floors}).experiments[0]

    ln2 = math.log(2)
    lost, won = verdict(1.5 / ln2), verdict(0.5 / ln2)  # accuracies of 0.85 and 0.95
    assert lost.arms[0].neither_learnt
    assert lost.notes[0] == (
        "baseline ends at 0.850 accuracy: no better than the majority answer (0.900), so it has "
        "not learnt more than that."
    )
    assert (won.arms[0].learnt, won.baseline.learnt) == (True, True)
    table = floors_table(won, study.experiments[0])
    assert table is not None
    assert table.head[2] == "score"
    assert [row[2].note for row in table.rows] == ["accuracy", "nats per example"]
    assert (
        won.notes[0] == "baseline ends at 0.950 accuracy, better than the majority answer (0.900)."
    )
