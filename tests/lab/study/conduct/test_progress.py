"""The board and what is drawn of it, and the sentences before and after a study."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.lab.study.records_of import Behaviour, experiment_of, record_of, records_of, study_of
from tilelab.common.terminal import in_words
from tilelab.study.ask.config import Arm, Design, Study, Sweep
from tilelab.study.conduct import progress
from tilelab.study.conduct import progress as progresses
from tilelab.study.conduct.progress import Board, LineProgress, LiveProgress, makespan, showing
from tilelab.study.plan import Agenda, planned
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.judge import judge

STEP = {"event": "step", "loss": 2.5, "wall_s": 2.0, "warmup": False}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progresses, "time", clock)
    return clock


def board_of(
    study: Study | None = None, records: dict[str, RunRecord] | None = None, jobs: int = 1
) -> Board:
    agenda = Agenda(study or study_of(experiment_of("lion", seeds=(0, 1))), records or {})
    return Board(agenda, dict.fromkeys((run.name for run in agenda.runs), 60.0), jobs)


@pytest.mark.parametrize(
    ("durations", "jobs", "seconds"),
    [
        ([], 2, 0.0),
        ([(3, False)] * 4, 1, 12.0),
        ([(3, False)] * 4, 2, 6.0),
        ([(5, False), (1, False), (1, False)], 2, 5.0),
        # One that is alone waits for all, and all wait for it.
        ([(5, False), (1, False), (2, True), (1, False), (1, False)], 2, 8.0),
    ],
)
def test_makespan(durations: list[tuple[float, bool]], jobs: int, seconds: float) -> None:
    assert makespan(durations, jobs) == seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.34, "0.3 s"), (45.4, "45 s"), (90, "1:30 min"), (125, "2:05 min"),
        (3600, "1:00 h"), (12_000, "3:20 h"), (47.99 * 3600, "47:59 h"), (216_000, "2.5 days"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_time_left_follows_what_was_seen(clock: Clock) -> None:
    unknown = Board(Agenda(study_of(), {}), {}, 1)  # without a forecast
    assert unknown.left_s() == pytest.approx(9 * 40 * unknown._step_s)
    board = board_of()
    assert board.left_s() == 4 * 60
    run = next(iter(board.lanes.values())).run
    board.started(run)
    assert board.left_s() == 4 * 60
    board.event(run, {"event": "start", "from_step": 0})
    board.event(run, {**STEP, "step": 10})  # of 40, at 2 s a step
    assert board.left_s() == 30 * 2 + 3 * 60
    clock.now += 30  # it took half of what was expected: so will the others
    board.ended(run, record_of(run, Behaviour()))
    assert board.left_s() == 3 * 30
    assert board.done == 1


def test_a_run_that_is_taken_up_again_counts_for_its_rest_only(clock: Clock) -> None:
    study = study_of(experiment_of("lion", seeds=(0, 1)))
    board = board_of(study, records_of(study, {"lion": Behaviour(stopped={0: 30, 1: 0})}))
    run = board.lanes["optimizers/lion/seed-0"].run
    assert board.left_s() == 15 + 60
    board.started(run)
    clock.now += 15
    board.ended(run, record_of(run, Behaviour()))
    assert board.left_s() == 60


def test_a_run_that_begins_again_without_its_checkpoint_counts_whole(clock: Clock) -> None:
    study = study_of(experiment_of("lion", seeds=(0, 1)))
    board = board_of(study, records_of(study, {"lion": Behaviour(stopped={0: 30, 1: 0})}))
    run = board.lanes["optimizers/lion/seed-0"].run
    board.started(run)
    board.event(run, {"event": "start", "from_step": 0})
    clock.now += 60
    board.ended(run, record_of(run, Behaviour()))
    assert board.left_s() == 60


def test_an_arm_that_a_sweep_lost_is_not_waited_for() -> None:
    sweep = Sweep(values={"baseline": (0.1, 0.2), "lion": (0.1, 0.2)}, seeds=(8, 9))
    study = study_of(experiment_of("lion", sweep=sweep, seeds=(0, 1)))
    agenda = Agenda(study, {})
    board = Board(agenda, dict.fromkeys((run.name for run in agenda.runs), 60.0), 1)
    lanes = [lane for lane in board.lanes.values() if lane.run.phase == "sweep"]
    # One seed of each candidate of lion's, and one candidate of the baseline's, diverge.
    lost = {("lion", 0.1, 8), ("lion", 0.2, 9), ("baseline", 0.1, 8), ("baseline", 0.1, 9)}
    for lane in lanes:
        run = lane.run
        survives = 0.0 if (run.arm, run.candidate, run.seed) in lost else 1.0
        record = record_of(run, Behaviour(survives=survives))
        assert board.lanes["optimizers/lion/seed-0"].status == "waiting"
        agenda.ended(run, record)
        board.ended(run, record)
    assert board.lanes["optimizers/lion/seed-0"].status == "diverged"
    again = board_of(study, agenda.records)
    assert (board.done, again.done) == (8 + 2, 8)
    for each in (board, again):
        assert each.lanes["optimizers/baseline/seed-0"].status == "waiting"
        assert each.left_s() < 2 * 60 + 1
    assert "✗ every candidate diverged" in text_of(None, study, board)


def lines_of(board: Board, clock: Clock) -> tuple[LineProgress, io.StringIO]:
    stream = io.StringIO()
    return LineProgress(board, Console(file=stream, width=60)), stream


def test_lines_where_there_is_no_terminal(clock: Clock) -> None:
    board = board_of()
    progress, stream = lines_of(board, clock)
    run = next(iter(board.lanes.values())).run
    board.started(run)
    board.event(run, {**STEP, "step": 7})
    progress.tick()
    assert stream.getvalue() == ""
    clock.now += 16
    progress.tick()
    progress.tick()
    assert stream.getvalue() == (
        "0 of 4 runs, 4:06 min left: optimizers/baseline/seed-0 7/40 2.500\n"
    )
    stream.truncate(0)
    for watcher in (board, progress):
        watcher.ended(run, record_of(run, Behaviour(finals={0: 2.0})))
    assert "1 of 4 runs" in stream.getvalue()
    assert "optimizers/baseline/seed-0 done, held-out loss 1.3863, 2.3 s" in stream.getvalue()
    other = board.lanes["optimizers/lion/seed-1"].run
    progress.ended(other, record_of(other, Behaviour(diverged={1: 5})))
    assert "lion/seed-1 diverged: the loss of step 5 is not finite" in stream.getvalue()
    assert all(len(line) > 60 for line in stream.getvalue().splitlines())  # never wrapped


def test_a_live_table_on_a_terminal(clock: Clock) -> None:
    sweep = Sweep(values={"baseline": (0.1, 0.2), "lion": (0.1, 0.2)}, seeds=(9,))
    one = experiment_of("lion", name="first")
    two = experiment_of("lion", name="second", sweep=sweep)
    study = study_of(one, two)
    records = {
        name: record
        for name, record in records_of(study, {"first/lion": Behaviour(diverged={1: 5})}).items()
        if name.startswith("first") or "sweep" in name
    }
    del records["first/lion/seed-2"]
    board = board_of(study, records, jobs=2)
    run = board.lanes["first/lion/seed-2"].run
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, _environ={"TERM": "dumb"})
    with showing(study, board, console) as progress:
        assert isinstance(progress, LiveProgress)
        board.started(run)
        board.event(run, {**STEP, "step": 7})
        shown = text_of(progress, study, board)
        clock.now += 2
        progress.tick()
    assert "first" in shown
    assert "✗ diverged at step 5" in shown
    assert "▸ 7/40 2.500" in shown
    assert "✓ " in shown
    assert "2/2" in shown  # the trials
    assert "9 of 16 runs" in shown
    # An experiment that is over, or has not begun, is one line.
    known = {name: each for name, each in records_of(study).items() if name.startswith("first")}
    shown = text_of(progress, study, board_of(study, known))
    assert "first: 6 runs, done" in shown
    assert "second: 10 runs, waiting" in shown
    assert "seed 0" not in shown
    # Nothing runs any more when the block has ended.
    assert board.lanes[run.name].status == "waiting"


def text_of(progress: Any, study: Study, board: Board) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(progresses.picture(study, board))
    return console.export_text()


SWEEP = Sweep(values=dict.fromkeys(("baseline", "lion", "wsd", "lion+wsd"), (0.001, 0.002)))


def test_the_opening_says_what_is_compared() -> None:
    study = study_of(experiment_of("lion", "wsd", "lion+wsd", sweep=SWEEP))
    text = progress.opening(study, Path("studies/x"))
    assert "baseline against lion, wsd, lion+wsd; 3 seeds, 40 steps" in text
    assert "after 8 trials of optimizer.lr" in text
    assert text.endswith("Folder: studies/x")
    assert "against nothing; 1 seed" in progress.opening(
        study_of(experiment_of(seeds=(0,))), Path()
    )


def test_the_start_says_how_long_it_takes_and_what_runs_alone() -> None:
    tasks = planned(study_of())
    assert progress.start(tasks, 9, 2, 1, 125.0) == (
        "9 runs to do, 2 at once, 1 thread each. Expected duration: about 2:05 min. "
        "Ctrl-C stops; the same command goes on."
    )
    some = progress.start(tasks[:4], 9, 1, 2, 20.0)
    assert some.startswith("4 of 9 runs to do, one at a time, 2 threads each")
    kernels = experiment_of(Arm(name="sdpa", kind="systems"), name="kernels")
    alone = planned(study_of(kernels))
    assert "one at a time (those that compare" in progress.start(alone, 6, 2, 1, 1.0)
    both = [*alone, *planned(study_of())]
    assert "2 at once (those that compare kernels have" in progress.start(both, 15, 2, 1, 1.0)
    assert "one at a time, 1 thread" in progress.start(both, 15, 1, 1, 1.0)


def verdicts_of(study: Study, records: Mapping[str, RunRecord]) -> str:
    """What the terminal says of them."""
    verdict = judge(study, records)
    to = Console(width=100, file=io.StringIO(), record=True)
    to.print(progress.verdicts(verdict))
    return to.export_text()


def test_every_arm_has_its_verdict() -> None:
    study = study_of(experiment_of("lion", "wsd", "lion+wsd", sweep=SWEEP))
    behaviours = {
        "lion": Behaviour(effect=-0.3, kernels=("sdpa math",), pace=2.0, activations=0.5),
        "wsd": Behaviour(diverged={1: 5}),
    }
    text = verdicts_of(study, records_of(study, behaviours))
    lines = text.splitlines()
    assert any(line.startswith("  lion  ") and "better" in line for line in lines)
    assert any(line.startswith("  wsd  ") and "diverged" in line for line in lines)
    assert "lion with wsd" in text
    assert "sdpa math" in text  # the kernel flag
    assert "Speed x2.00 [x2.00, x2.00], peak memory x" in " ".join(text.split())
    assert "saved activations x0.50" in " ".join(text.split())
    assert text.count("0.001") >= 4  # what each sweep chose
    assert all(len(line) <= 100 for line in lines)


def test_an_effect_is_not_taken_for_the_arm_of_its_name() -> None:
    design = Design(factors=("lion", "wsd"))
    study = study_of(experiment_of("lion", "wsd", "lion+wsd", design=design))
    lines = verdicts_of(study, records_of(study)).splitlines()
    names = [line.split("  ")[1] for line in lines if re.match(r"  \w.*  ", line)]
    assert names[:3] == ["lion", "wsd", "lion+wsd"]
    assert names[3:6] == ["effect of lion", "effect of wsd", "effect of lion x wsd"]


def test_the_speed_of_an_arm_is_by_the_clock_that_load_did_not_move() -> None:
    study = study_of(experiment_of("lion"))
    records = records_of(study)
    for seed, load in enumerate((2.0, 3.0, 2.5)):
        record = records[f"optimizers/lion/seed-{seed}"]
        record.steps = [replace(each, wall_s=load * each.wall_s) for each in record.steps]
    said = " ".join(verdicts_of(study, records).split())
    assert "Speed x1.00 [x1.00, x1.00] (by processor time: other work slowed" in said
    for record in records.values():
        where = {**record.start.environment, "threads": 2}
        record.starts = [replace(record.start, environment=where)]
    said = " ".join(verdicts_of(study, records).split())
    assert "Speed withheld (its interval is wider than" in said
