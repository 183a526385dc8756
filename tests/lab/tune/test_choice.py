"""Which candidates are tried, which are dropped, and when one is kept."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab.tune.team import FAMILY, FakeTeam, gain
from tilelab.common.clock import Spread
from tilelab.gate.cases import operands_of
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.tune.command import MOST, Finding, Team, beats, lines_of, plan_of, summary, tune
from tilelab.tune.worker import (
    Job,
    candidates,
    is_known,
    large_cases,
    read_job,
    small_cases,
    table_blocks,
)
from tilewise.kernels.gpu.config import (
    FAMILIES,
    KINDS,
    PASSES,
    UNPROVEN,
    WIDTHS,
    Blocks,
    Config,
    Pass,
    shared_need,
)

JOB = Job("forward", "bfloat16", 128, "plain")
TABLE = Blocks(128, 128, 8, 2)
REAL: Any = Setting()


def tuned(team: FakeTeam, job: Job = JOB) -> Finding:
    stand_in: Any = team
    return tune(REAL, stand_in, FAMILY, job)


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_are_few_and_fit(family: str) -> None:
    for name in PASSES:
        for dtype in ("bfloat16", "float32"):
            for width in WIDTHS[:3]:
                for kind in KINDS:
                    job = Job(name, dtype, width, kind)
                    found = candidates(family, job, MOST)
                    assert 1 <= len(found) <= MOST == 7
                    assert len(set(found)) == len(found)
                    assert table_blocks(family, job) not in found
                    for blocks in found:
                        need = shared_need(name, blocks, job.type.itemsize, width, width)
                        assert need <= FAMILIES[family].shared_bytes


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("name", "dtype"), [("fused", "bfloat16"), ("grouped8", "float8_e4m3fn")])
def test_what_no_gpu_has_run_is_compared_with_what_is_in_use(
    name: Pass, dtype: str, width: int
) -> None:
    blocks, job = UNPROVEN[name, FAMILY, width], Job(name, dtype, width, "plain")
    assert is_known(FAMILY, job)
    assert candidates(FAMILY, job, MOST) == [blocks]
    assert str(table_blocks(FAMILY, job)) != str(blocks)
    chip = Config(FAMILY, overrides=((name, blocks),))
    for case in (*small_cases(job, tiny=False), *large_cases(job, tiny=False)):
        problem = operands_of(case)[0]
        found = chip.fused(problem) if name == "fused" else chip.in_groups("forward", problem)
        assert found == blocks, case.name
    for other in (
        job._replace(kind="+"),
        job._replace(width=256),
        job._replace(dtype="float32"),
    ):
        assert not is_known(FAMILY, other)
    assert not is_known("sm_100", job)


def test_the_nearest_come_first() -> None:
    found = [str(blocks) for blocks in candidates(FAMILY, JOB, 4)]
    assert str(TABLE) == "128x128/8/2"
    assert found == ["128x128/8/3", "128x128/8/1", "128x64/8/2", "128x64/8/3"]


def test_a_job_is_read_as_it_is_written() -> None:
    job = Job("dq", "float32", 256, "*")
    blocks = [Blocks(64, 32, 4, 2), Blocks(16, 128, 8, 1)]
    assert read_job(" ".join(str(each) for each in (job, *blocks))) == (job, blocks)


@pytest.mark.parametrize(
    ("new", "table", "better"),
    [
        ((0.90, 0.0), (1.0, 0.0), True),
        ((0.995, 0.0), (1.0, 0.0), False),  # not worth it
        ((0.95, 0.03), (1.0, 0.03), False),  # within the noise
        ((0.90, 0.03), (1.0, 0.03), True),
        ((1.1, 0.0), (1.0, 0.0), False),
    ],
)
def test_a_gain_must_be_more_than_the_noise(
    new: tuple[float, float], table: tuple[float, float], better: bool
) -> None:
    one, other = (Spread(m, m, m, m * (1 - noise), m * (1 + noise)) for m, noise in (new, table))
    assert beats(one, other) is better


def test_the_fastest_is_kept_and_timed_again() -> None:
    team = FakeTeam(gain({"128x128/8/3": 0.8, "128x64/8/2": 0.9}))
    finding = tuned(team)
    assert [len(each) for each in team.measured] == [8, 2]
    assert team.measured[1] == [str(TABLE), "128x128/8/3"]
    assert finding.kept
    entry = finding.entry
    assert entry is not None
    assert (entry.place, entry.table_blocks) == (JOB.place, TABLE)
    assert str(entry.blocks) == "128x128/8/3"
    assert entry.ratio == pytest.approx(1.25)
    (line,) = lines_of(finding)
    assert line.split()[:9] == ["forward", "bfloat16", "128", "plain", "128x128/8/2", "1",
                                "128x128/8/3", "0.8", "1.250"]  # fmt: skip
    assert line.endswith("kept")


def test_what_is_no_faster_the_second_time_is_not_kept() -> None:
    seen: list[Blocks] = []

    def samples(blocks: Blocks, is_table: bool) -> list[float]:
        seen.append(blocks)
        return [1e-3] if is_table or seen.count(blocks) > 1 else [0.5e-3]

    finding = tuned(FakeTeam(samples))
    assert not finding.kept
    assert finding.entry is None
    assert next(iter(lines_of(finding))).endswith("the table's stay")


def test_wrong_spilling_and_failing_candidates_are_dropped() -> None:
    checked = {
        "128x128/8/3": Row("check", "", "wrong", "causal: out: 3.00 times"),
        "128x128/8/1": Row("check", "", values={"spills": 14}),
        "128x64/8/2": Row("check", "", "error", "OutOfResources: shared memory"),
    }
    team = FakeTeam(gain({"128x64/8/3": 0.9, "128x128/8/3": 0.1}), checked)
    finding = tuned(team)
    assert not set(team.measured[0]) & set(checked)
    assert finding.best is not None
    assert str(finding.best[0]) == "128x64/8/3"
    assert list(lines_of(finding))[1:] == [
        "    dropped 128x128/8/3: causal: out: 3.00 times",
        "    dropped 128x128/8/1: 14 registers spilled",
        "    dropped 128x64/8/2: OutOfResources: shared memory",
    ]


def test_what_fails_when_it_is_timed_is_dropped() -> None:
    team = FakeTeam(gain({"128x128/8/3": 0.5, "128x64/8/2": 0.9}), failed=["128x128/8/3"])
    finding = tuned(team)
    assert finding.best is not None
    assert str(finding.best[0]) == "128x64/8/2"
    assert list(lines_of(finding))[1:] == ["    dropped 128x128/8/3: OutOfMemory"]


def test_a_timing_that_comes_to_nothing() -> None:
    class Broken(FakeTeam):
        def measure(self, job: Job, blocks: Sequence[Blocks]) -> Row:
            return Row("measure", str(job), "error", "ended after 120 s")

    finding = tuned(Broken(gain({})))
    assert (finding.failure, finding.entry) == ("timing: ended after 120 s", None)


def test_nothing_is_timed_where_the_table_s_own_fail() -> None:
    checked = {str(TABLE): Row("check", "", "wrong", "causal: out: NaN")}
    team = FakeTeam(gain({}), checked)
    finding = tuned(team)
    assert (team.measured, finding.entry) == ([], None)
    assert finding.failure == "the table's own 128x128/8/2: causal: out: NaN"
    assert "FAILED" in next(iter(lines_of(finding)))
    assert list(summary([finding], [JOB])) == [
        "0 of 1 have faster blocks than the table's",
        "1 failed",
        "1 not done for want of time: forward bfloat16 128 plain",
    ]


def test_the_table_s_own_may_spill() -> None:
    checked = {str(TABLE): Row("check", "", values={"spills": 3})}
    assert tuned(FakeTeam(gain({"128x128/8/3": 0.8}), checked)).kept


def test_no_candidate_left() -> None:
    bad = {str(each): Row("check", "", "error", "no") for each in candidates(FAMILY, JOB, MOST)}
    team = FakeTeam(gain({}), bad)
    finding = tuned(team)
    assert team.measured == [[str(TABLE)]]
    assert (finding.best, finding.kept, len(finding.dropped)) == (None, False, MOST)
    assert "no other is exact and fits" in next(iter(lines_of(finding)))


def test_what_would_be_tried_is_listed() -> None:
    (line,) = plan_of(FAMILY, [JOB], 2)
    assert line.split() == [*str(JOB).split(), "table", "128x128/8/2", "tries",
                            "128x128/8/3", "128x128/8/1"]  # fmt: skip


@pytest.mark.parametrize("self_test", [False, True])
def test_a_process_that_dies_costs_its_candidate(self_test: bool) -> None:
    """Of several processes at once, and of one that does everything."""
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
    team = Team(Setting(self_test=self_test), command)
    blocks = [Blocks(16, 16, warps, 1) for warps in (8, 1, 2, 4)] + [Blocks(32, 32, 4, 1)] * 3
    try:
        died, wrong, failed, spilled, *good = team.check(JOB, blocks)
        assert team.measure(JOB, blocks[-1:]).status == "ok"
    finally:
        team.close()
    assert died.status == "error"
    assert "ended with 7" in died.note
    assert "an illegal access" in died.note
    assert (wrong.status, failed.status) == ("wrong", "error")
    assert spilled.values["spills"] == 12
    assert [row.status for row in good] == ["ok"] * 3
    assert os.getpid() not in {row.values["pid"] for row in good}


def test_no_job_goes_on_beyond_the_end() -> None:
    """What hangs is ended then, and nothing begins later."""
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
    team = Team(Setting(self_test=True), command)
    begun = time.monotonic()
    team.until = begun + 2
    try:
        (hung,) = team.check(JOB, [Blocks(16, 16, 4, 3)])
        later = team.measure(JOB, [Blocks(32, 32, 4, 1)])
    finally:
        team.close()
    assert "it had no more time" in hung.note
    assert (later.status, later.note) == ("skipped", "no time was left")
    assert time.monotonic() - begun < 20
