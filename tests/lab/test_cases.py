"""The table of cases: names, and that a row is in every room that it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from tilelab.bench import goals, suites
from tilelab.bench.steps import Settings
from tilelab.cases import table
from tilelab.cases.case import Case, Goal, Use
from tilelab.cases.inputs import variant_of
from tilelab.gate import cases as gate
from tilelab.gpu_check import accuracy, speed
from tilelab.gpu_check.setting import Setting
from tilelab.tune.worker import Job, large_cases, small_cases
from tilewise.errors import InvalidArgument

USES: tuple[Use, ...] = get_args(Use)
ROW = Case("new", mask=("window_share",), passes="both", uses=USES, goal=Goal(1.0), quick=True)


def test_names_are_unique_in_a_room() -> None:
    for use in USES:
        names = [(str(case), case.kind) for case in table.rows(use)]
        assert len(set(names)) == len(names) > 0, use


def test_every_word_of_a_row_is_known() -> None:
    for case in table.ROWS:
        variant_of(case, "meta")
    with pytest.raises(InvalidArgument, match=r"score 'sofcap'; required: .*\bsoftcap\b"):
        variant_of(replace(ROW, score=("sofcap",)), "meta")


def rooms() -> dict[Use, list[str]]:
    """What every room makes of the rows: names of jobs, steps and cases."""
    setting, settings = Setting(), Settings(lengths=(64,), dtypes=("float32",), flex=False)
    job = Job("forward", "float32", 64, "plain")

    def names(cases: list[Case]) -> list[str]:
        return [case.name for case in cases]

    def timed_in(use: Use) -> list[str]:
        kinds = {row.name for row in table.rows(use)}
        return [case.name for case in speed.cases(setting.sizes) if case.kind in kinds]

    return {
        "tests": names(table.rows("tests")),
        "accuracy": accuracy.jobs(setting),
        "gate": [case.name for case in gate.cases()],
        "goals": names(goals.cases()),
        "tune small": names(small_cases(job, tiny=False)),
        "sweep": [step.name for step in suites.speed(settings)],
        "paper": [step.name for step in suites.paper(settings)],
        "variants": [step.name for step in suites.variants(settings)],
        "head widths": [step.name for step in suites.widths(settings)],
        "long": accuracy.long_jobs(setting),
        "one width": timed_in("one width"),
        "widths": timed_in("widths"),
        "lengths": timed_in("lengths"),
        "tune large": names(large_cases(job, tiny=False)),
    }


@pytest.mark.parametrize("use", USES)
def test_a_new_row_is_in_the_room_that_it_is_for(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in no other."""
    before = rooms()
    assert before.keys() == set(USES)
    monkeypatch.setattr(table, "ROWS", (*table.ROWS, replace(ROW, uses=(use,))))
    for room, names in rooms().items():
        more = set(names) - set(before[room])
        assert all("new" in name for name in more)
        assert bool(more) == (room == use), room
