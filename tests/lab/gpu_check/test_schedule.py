"""Steps, jobs and processes: time that runs out, processes that die, and what is left after."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import tilelab
import tilewise
from tilelab import gpu_check
from tilelab.gpu_check import conduct, worker
from tilelab.gpu_check.record import Record, Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.worker import STEPS, Step, Team, Worker
from tilewise.errors import Unsupported

REAL, SELF_TEST = Setting(), Setting(self_test=True)
FAKE = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]


def planned(names: str, budget_s: float, job_s: float, parallel: bool = False) -> Step:
    """A step with these jobs: "a b c" has three."""
    return Step(names, budget_s, job_s, lambda _: names.split(), lambda *_: iter(()), parallel)


class Answers:
    """Stands for a team and its one worker: answers at once, and remembers what it was asked."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.asked: list[tuple[str, float]] = []
        self.now, self.took_s, self.closed = 0.0, took_s, 0

    def each(self, ask: Callable[[Any, str], None], jobs: Sequence[str]) -> None:
        for job in jobs:
            ask(self, job)

    def ask(self, step: str, job: str, limit_s: float) -> list[Row]:
        self.asked.append((job, limit_s))
        self.now += self.took_s
        return [Row(step, job, "error" if job == "bad" else "ok")]

    def close(self) -> None:
        self.closed += 1

    def conduct(self, steps: list[Step], limit_s: float, changed: Any = lambda _: None) -> Record:
        record, stand_in = Record(False, "gpu"), cast(Any, self)
        more: dict[str, Any] = {"clock": lambda: self.now, "start": lambda *_: stand_in}
        conduct(REAL, steps, record, limit_s, changed=lambda: changed(record), **more)
        return record


@pytest.fixture
def child() -> Iterator[Worker]:
    found = Worker(SELF_TEST, command=FAKE)
    yield found
    found.close()


def test_an_error_loses_nothing_else() -> None:
    answers = Answers()
    record = answers.conduct([planned("a bad c", 10, 5), planned("d", 10, 5)], 100)
    assert [(row.name, row.status) for row in record.rows] == [
        ("a", "ok"),
        ("bad", "error"),
        ("c", "ok"),
        ("d", "ok"),
    ]
    assert [row.name for row in record.failures] == ["bad"]
    assert answers.closed == 1


def test_a_step_has_its_budget_and_no_more() -> None:
    """What has not begun by then is skipped, and the next step has its own time."""
    answers = Answers(took_s=4.5)
    record = answers.conduct([planned("a b c d", 10, 9), planned("e", 10, 9)], 100)
    assert [row.status for row in record.rows] == ["ok", "ok", "skipped", "skipped", "ok"]
    assert answers.asked == [("a", 9), ("b", 5.5), ("e", 9)]
    assert record.seconds == {"a b c d": 9.0, "e": 4.5}


def test_the_whole_has_a_limit() -> None:
    answers = Answers(took_s=4.0)
    record = answers.conduct([planned("a b", 100, 9), planned("c d", 100, 9)], 11)
    assert [row.status for row in record.rows] == ["ok", "ok", "ok", "skipped"]
    assert answers.asked[-1] == ("c", 3)


@pytest.mark.parametrize(("budget_s", "status"), [(7, "skipped"), (10, "error"), (20, "error")])
def test_a_job_with_little_time_left_did_not_hang(budget_s: float, status: str) -> None:
    """It has 2, 5 or 9 of its 9 seconds: only an end after more than half of them is its own."""
    answers = Answers(took_s=5.0)
    record = answers.conduct([planned("a bad", budget_s, 9)], 100)
    assert [row.status for row in record.rows] == ["ok", status]


def test_a_child_that_cannot_start_is_an_error() -> None:
    class Broken(Answers):
        def ask(self, step: str, job: str, limit_s: float) -> list[Row]:
            raise OSError("no process")

    record = Broken().conduct([planned("a b", 10, 5)], 100)
    assert [(row.status, row.note) for row in record.rows] == [("error", "OSError: no process")] * 2


def test_the_record_is_kept_after_each_job() -> None:
    lengths: list[int] = []
    Answers().conduct([planned("a b", 10, 5)], 100, lambda record: lengths.append(len(record.rows)))
    assert lengths == [1, 2]


def test_parallel_steps_share_their_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "processes", lambda *_: 3)
    counts: list[int] = []

    def start(setting: Setting, count: int) -> Team:
        counts.append(count)
        return Team(setting, count, FAKE)

    names = " ".join(f"job{i}" for i in range(9))
    record = Record(False, "gpu")
    conduct(REAL, [planned(names, 60, 60, parallel=True)], record, 60, start=start)
    assert sorted(row.name for row in record.rows) == sorted(names.split())
    assert counts == [1, 3]  # the single one was not needed, and is there for other steps
    assert len({row.values["pid"] for row in record.rows}) <= 3


def test_one_process_serves_many_jobs(child: Worker) -> None:
    first, second = (child.ask("s", job, 30) for job in ("a", "b"))
    assert [row.name for row in first + second] == ["a", "b"]
    assert first[0].values["pid"] == second[0].values["pid"]


def test_a_process_that_takes_too_long_is_ended(child: Worker) -> None:
    child.ask("s", "first", 60)
    begun = time.perf_counter()
    rows = child.ask("s", "sleep", 3)
    assert time.perf_counter() - begun < 30
    assert [(row.name, row.status) for row in rows] == [("sleep", "ok"), ("sleep", "error")]
    assert "no more time" in rows[1].note
    assert child.ask("s", "next", 30)[0].status == "ok"


def test_a_process_that_dies_leaves_its_last_words(child: Worker) -> None:
    (row,) = child.ask("s", "die", 30)
    assert row.status == "error"
    assert "ended with 7" in row.note
    assert "the last words" in row.note
    assert child.ask("s", "next", 30)[0].status == "ok"


def test_a_process_that_talks_nonsense_is_replaced(child: Worker) -> None:
    before = child.ask("s", "a", 30)[0].values["pid"]
    (row,) = child.ask("s", "babble", 30)
    assert row.status == "error"
    assert "is no answer" in row.note
    assert child.ask("s", "b", 30)[0].values["pid"] != before


def test_a_process_that_lost_its_gpu_is_replaced(child: Worker) -> None:
    before = child.ask("s", "a", 30)[0].values["pid"]
    (row,) = child.ask("s", "lost", 30)
    assert row.note == "illegal access"
    time.sleep(0.5)
    (after,) = child.ask("s", "b", 30)
    assert (after.name, after.status) == ("b", "ok")
    assert after.values["pid"] != before


def test_what_a_job_raises_is_a_row() -> None:
    """What it found before stays; what the backend cannot do is no error."""

    def raising(setting: Setting, step: str, job: str) -> Iterator[Row]:
        yield Row("s", job)
        raise {"odd": ValueError("two\nlines"), "not": Unsupported("it", {"gpu": ["why"]})}[job]

    rows = worker.do(SELF_TEST, "s", "odd", raising)
    assert [row.status for row in rows] == ["ok", "error"]
    assert rows[1].note == "ValueError: two lines"
    assert "test_schedule.py" in rows[1].values["traceback"]
    rows = worker.do(SELF_TEST, "s", "not", raising)
    assert [(row.status, row.note) for row in rows] == [("ok", ""), ("unsupported", "why")]


def test_the_interpreter_is_asked_for_before_triton_is_there() -> None:
    assert SELF_TEST.environment()["TRITON_INTERPRET"] == "1"
    assert REAL.environment(parallel=True)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in REAL.environment()
    sources = [Path(each.__path__[0]).resolve().parent for each in (tilewise, tilelab)]
    assert REAL.environment()["PYTHONPATH"].split(":")[:2] == [*map(str, sources)]


def test_every_step_has_jobs_of_different_names() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step, setting in itertools.product(STEPS, (REAL, SELF_TEST)):
        jobs = step.jobs(setting)
        assert jobs
        assert len(set(jobs)) == len(jobs)
        assert step.job_s <= step.budget_s
