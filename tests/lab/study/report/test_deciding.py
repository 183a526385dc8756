"""What the report shows of designs, halving, sequential seeds, survival and the front."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.study.records_of import (
    Behaviour,
    experiment_of,
    folder_of,
    records_of,
    study_of,
)
from tilelab.study import report
from tilelab.study.ask.config import Sequential


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The page and its twin, of a design with a target and of a sequential experiment."""
    design = experiment_of("a", "b", "a+b", name="both", design={"factors": ("a", "b")}, target=2.6)
    added = experiment_of(
        "clear", "noisy", name="added", seeds=tuple(range(6)), sequential=Sequential(looks=(3, 6))
    )
    study = study_of(design, added)
    behaviours = {
        "a": Behaviour(effect=-0.1, pace=0.5),
        "b": Behaviour(effect=0.5),
        "a+b": Behaviour(effect=-0.3, pace=0.8),
        "clear": Behaviour(effect=-0.2, absent=(3, 4, 5)),
        "noisy": Behaviour(effect=-0.01, noise=0.1),
    }
    folder: Path = tmp_path_factory.mktemp("deciding")
    page, twin = report.write(
        report.gather(folder_of(folder, study, records_of(study, behaviours)))
    )
    return page.read_text(), twin.read_text()


def test_effects_are_a_map_and_a_table(written: tuple[str, str]) -> None:
    page, twin = written
    assert "<h3>Effects and interactions, bits per byte</h3>" in page
    assert "var(--better)" in page
    assert "var(--worse)" in page
    assert "#### Effects of the factors" in twin
    assert "| a \N{MULTIPLICATION SIGN} b | better together |" in twin


def test_survival_and_the_front_have_their_tables(written: tuple[str, str]) -> None:
    page, twin = written
    assert "<h3>Runs not at 2.6 bits per byte yet</h3>" in page
    assert "<h3>Quality against cost</h3>" in page
    assert "#### Runs that have not reached the target" in twin
    front = twin.split("#### Quality against cost")[1].split("####")[0]
    rows = {line.split("|")[1].strip(): line for line in front.splitlines() if line[:1] == "|"}
    assert "on the front" in rows["a+b"]
    assert "on the front" in rows["baseline"]
    assert "beaten by" in rows["b"]


def test_seeds_that_were_not_needed_are_not_missing(written: tuple[str, str]) -> None:
    page, twin = written
    assert "not finished" not in page
    assert "not needed" in twin
    assert "looks after 3 and 6 seeds at levels of 1.3 and 3.8 %, which add up to 5 %" in twin
