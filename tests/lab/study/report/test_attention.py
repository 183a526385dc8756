"""Attention's statistics in the report: curves, a table by layer, and who has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.study.records_of import (
    config_of,
    experiment_of,
    folder_of,
    records_of,
    study_of,
)
from tilelab.study.ask.config import Arm
from tilelab.study.records.events import LayerSoftmax, RunRecord
from tilelab.study.report import gather, write
from tilelab.study.report.attention import attention_charts, layers_of
from tilelab.study.verdict.measures import measure, over_seeds

STUDY = study_of(
    experiment_of(
        Arm(name="qk-norm", changes={"model.qk_norm": True}),
        Arm(name="plain", changes={"attention.implementation": "plain"}, kind="systems"),
        baseline=config_of(**{"model.layers": 2}),
    )
)


def _seen(step: int, growth: float) -> list[LayerSoftmax]:
    """Two layers; logits grow by the step, and the second layer's lowest head collapses."""
    fallen = max(3.0 - growth * step / 20, 0.01)
    return [
        LayerSoftmax(0, 3.0, 2.5, 1.0 + growth * step),
        LayerSoftmax(1, 2.0, fallen, 0.5 + growth * step),
    ]


def _records(growths: dict[str, float]) -> dict[str, RunRecord]:
    """The records of the study, with statistics in these arms."""
    records = records_of(STUDY)
    for record in records.values():
        growth = growths.get(record.start.arm)
        if growth is not None:
            record.evaluations = [
                replace(each, softmaxes=_seen(each.step, growth + 0.01 * record.start.seed))
                for each in record.evaluations
            ]
    return records


def _of(records: dict[str, RunRecord], arm: str) -> dict[int, RunRecord]:
    return {each.start.seed: each for each in records.values() if each.start.arm == arm}


def test_layers_are_means_over_the_seeds() -> None:
    found = layers_of("baseline", 0, _of(_records({"baseline": 1.0}), "baseline"))
    assert found is not None
    assert found.x == (0.0, 2560.0, 5120.0, 7680.0, 10240.0)
    assert found.logits[0] == pytest.approx((1.0, 11.1, 21.2, 31.3, 41.4))
    assert found.entropy == ((3.0,) * 5, (2.0,) * 5)
    assert found.lowest_head[1][-1] == pytest.approx(3 - 40 * 1.01 / 20)


def test_the_measures_of_a_run_are_the_outermost() -> None:
    records = _records({"baseline": 1.0})
    one = measure(records["optimizers/baseline/seed-0"])
    assert (one["max_logit"], one["entropy"]) == (41.0, 2.5)
    assert one["entropy_low"] == pytest.approx(1.0)
    of_seeds = over_seeds([measure(each) for each in _of(records, "baseline").values()])
    assert of_seeds["max_logit"] is not None
    assert of_seeds["max_logit"].values == pytest.approx((41.0, 41.4, 41.8))
    nothing = measure(records["optimizers/plain/seed-0"])
    assert (nothing["max_logit"], nothing["entropy"], nothing["entropy_low"]) == (None, None, None)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    records = _of(_records({"baseline": 1.0}), "baseline")
    broken = records[1]
    last = broken.evaluations[-1]
    gone = [replace(each, max_logit=None) for each in last.softmaxes or []]
    broken.evaluations[-1] = replace(last, softmaxes=gone)
    found = layers_of("baseline", 0, records)
    assert found is not None
    assert found.x[-1] == 7680.0
    assert measure(broken)["max_logit"] == pytest.approx(1.0 + 1.01 * 30)
    assert layers_of("plain", 2, {}) is None


def test_there_is_a_curve_for_each_quantity() -> None:
    arms = [
        found
        for place, arm in enumerate(("baseline", "qk-norm"))
        if (found := layers_of(arm, place, _of(_records({"baseline": 1.0, "qk-norm": 0.1}), arm)))
    ]
    logits, entropy = attention_charts(arms, "figure")
    assert logits.title == "Largest attention logit"
    assert "baseline from 1 to 41.4; qk-norm from 1 to 5.4" in logits.svg
    assert "baseline from 2.5 to 2.5" in entropy.svg
    assert list(attention_charts([each._replace(x=(0.0,)) for each in arms], "figure")) == []


def test_the_report_shows_them_and_says_who_has_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, STUDY, _records({"baseline": 1.0, "qk-norm": 0.1}))
    page, twin = write(gather(folder))
    text = twin.read_text("utf-8")
    assert "Largest attention logit" in page.read_text("utf-8")
    assert "| layer 1 | 2.00 (lowest head 0.98, logits up to 40.90) | 2.00 (" in text
    assert "| largest logit of the run | 41.40 (± 0.40) | 5.40 (± 0.40) |" in text
    assert "Nothing of plain: only tilewise's kernels keep statistics" in text


def test_a_report_without_any_has_no_table(tmp_path: Path) -> None:
    _, twin = write(gather(folder_of(tmp_path, STUDY, _records({}))))
    assert "Attention by layer" not in twin.read_text("utf-8")
