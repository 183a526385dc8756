"""``docs/metrics.md`` defines every measure, and with the numbers that the code uses."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tilelab.study.train.session import WARMUP_STEPS
from tilelab.study.verdict import measures
from tilelab.study.verdict.notes import FIRST_STEPS, SAME_START
from tilelab.study.verdict.result import ArmMeasures, ArmVerdict, MemorySplit, SweepResult

PAGE = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
WORDS = " ".join(PAGE.split())


@pytest.mark.parametrize("measure", measures.MEASURES.values(), ids=lambda each: each.name)
def test_every_measure_is_defined(measure: measures.Measure) -> None:
    assert f"| `{measure.name}` | {measure.formula} | {measure.unit} |" in PAGE


def test_ratios_and_memory_are_defined() -> None:
    parts = {each.name for each in (*fields(ArmMeasures), *fields(MemorySplit))}
    for name in parts - {"summaries", "kernels"}:
        assert f"`{name}`" in PAGE, name


def test_what_decides_is_defined() -> None:
    names = {each.name for each in fields(ArmVerdict)}
    for name in ("interval", "p_value", "p_holm", "p_equivalence", "p_equivalence_holm"):
        assert name in names
        assert f"`{name}`" in PAGE
    for name in ("more_seeds", "speed_withheld", "cost"):
        assert name in names
        assert f"`{name}`" in PAGE
    for name in ("survived", "chosen", "at_edge"):
        assert name in {each.name for each in fields(SweepResult)}
        assert f"`{name}`" in PAGE


def test_numbers_are_those_of_the_code() -> None:
    assert f"more than {measures.SPIKE_FACTOR:g} robust standard deviations" in WORDS
    assert f"up to {measures.SPIKE_WINDOW} losses before it" in WORDS
    assert f"fewer than {measures.SPIKE_HISTORY} losses before them" in WORDS
    assert f"by more than {SAME_START:.1%}".replace("%", " %") in WORDS
    assert f"over the first {FIRST_STEPS} steps" in WORDS
    assert WARMUP_STEPS == 2
    assert "the first two steps of every process" in WORDS


def test_the_contents_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-")
        for line in PAGE.splitlines()
        if line.startswith("## ")
    }
    links = re.findall(r"\]\(#([a-z0-9-]+)\)", PAGE)
    assert len(links) == len(headings)
    assert set(links) == headings
