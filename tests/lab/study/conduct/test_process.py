"""The pool and its processes: order, cores, failures, and that no process is left."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lab.study.conduct.conducting import FAKE
from tests.lab.study.records_of import config_of, experiment_of, study_of
from tilelab.common.files import DiskFullError
from tilelab.study.ask.config import Arm, Study
from tilelab.study.ask.run import RECORD, Execution, RunSpec
from tilelab.study.conduct import pool as pools
from tilelab.study.conduct.pool import Lost, Pool, RunError, Worker
from tilelab.study.conduct.process import Cores, Follower, Local, lock_folder
from tilelab.study.plan import Agenda, Watcher
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import read_records


@pytest.fixture(autouse=True)
def _children_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Remembers(Watcher):
    """Remembers what it was told; may interrupt at the first step."""

    def __init__(self, interrupt: type[BaseException] | None = None) -> None:
        self.told: list[tuple[str, str]] = []
        self.values: list[dict[str, Any]] = []
        self.interrupt = interrupt

    def started(self, run: RunSpec) -> None:
        self.told.append(("started", run.name))

    def event(self, run: RunSpec, values: dict[str, Any]) -> None:
        self.values.append(values)
        if self.interrupt is not None and values["event"] == "step":
            raise self.interrupt

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        self.told.append(("ended", run.name))
        assert record.done

    def lost(self, run: RunSpec, why: str) -> None:
        self.told.append(("lost", run.name))

    def tick(self) -> None:
        self.told.append(("tick", ""))


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[Cores]:
    with closing(Cores((0, 1), tmp_path / "locks")) as ours:
        yield ours


def study_that(acts: str, *arms: Arm | str, steps: int = 3, **fields: Any) -> Study:
    baseline = config_of(**{"data.source": acts, "budget.steps": steps})
    return study_of(experiment_of(*arms, baseline=baseline, **fields))


def pool_in(folder: Path, **fields: Any) -> Pool:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    cores = fields.pop("cores", None)
    return Pool(Local(execution_in(folder, **fields), cores), jobs=2)


def execution_in(folder: Path, **fields: Any) -> Execution:
    return Execution(folder=folder, cache=folder / "cache", **{"module": FAKE, **fields})


def all_children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in listed.read_text().split()} if listed.exists() else set()


@pytest.fixture
def others() -> set[int]:
    """Children that were there before: other tests keep processes for their whole session."""
    return all_children()


def test_it_does_everything_once(tmp_path: Path, cores: Cores) -> None:
    study, watcher = study_that("", "lion"), Remembers()
    agenda = Agenda(study, {})
    pool_in(tmp_path, cores=cores, environment={"chip": "x"}).work(agenda, [watcher])
    assert agenda.finished
    assert agenda.done == 6
    assert read_records(tmp_path).keys() == agenda.records.keys()
    starts = [each for each in watcher.values if each["event"] == "start"]
    assert len(starts) == 6
    assert all(len(record.steps) == 3 for record in agenda.records.values())
    assert {each["environment"]["chip"] for each in starts} == {"x"}
    # Both cores are used, and a core that is free is taken before one that is not.
    assert {each["environment"]["core"] for each in starts} == {0, 1}
    for name in agenda.records:
        assert watcher.told.index(("started", name)) < watcher.told.index(("ended", name))
    assert ("tick", "") in watcher.told
    # Everything that the records hold was told, nothing twice.
    assert sum(each["event"] == "step" for each in watcher.values) == 6 * 3
    assert sum(each["event"] == "end" for each in watcher.values) == 6
    again = Remembers()
    pool_in(tmp_path).work(Agenda(study, read_records(tmp_path)), [again])
    assert again.told == []


def test_more_threads_are_not_pinned(tmp_path: Path, cores: Cores) -> None:
    pool = pool_in(tmp_path, cores=cores, threads=2)
    agenda = Agenda(study_that("", seeds=(0,)), {})
    pool.work(agenda, [Remembers()])
    (record,) = agenda.records.values()
    assert record.start.environment["core"] is None


def test_only_training_keeps_freed_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compared as users meet them; a variable that the user has set stays."""
    compared = study_that("where", Arm(name="sdpa", kind="systems"), seeds=(0,))
    trained = study_that("where", seeds=(0,))
    for study, kept in ((compared, "None"), (trained, "1073741824"), (trained, "5")):
        if kept == "5":
            monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", kept)
        with pytest.raises(RunError, match=f"keeps {kept}, "):
            pool_in(tmp_path).work(Agenda(study, {}), [])


def test_runs_that_compare_kernels_have_the_machine_to_themselves(tmp_path: Path) -> None:
    systems = study_that("", Arm(name="sdpa", kind="systems"), name="kernels", seeds=(0,))
    study = Study(
        name="s",
        question="?",
        experiments=(*systems.experiments, *study_that("", "lion").experiments),
    )
    agenda, watcher = Agenda(study, {}), Remembers()
    pool_in(tmp_path).work(agenda, [watcher])
    # Told before anything can be seen of a process, and when it is gone.
    running: list[str] = []
    most = 0
    for what, name in watcher.told:
        if what == "started":
            running.append(name)
        elif what == "ended":
            running.remove(name)
        most = max(most, len(running))
        if any(each.startswith("kernels") for each in running):
            assert len(running) == 1, running
    assert running == []
    assert most == 2, "two runs at once were asked for"


@pytest.mark.parametrize(
    ("acts", "message"),
    [
        ("wrong", r"^optimizers/lion/seed-\d: the text is missing: get it$"),
        ("crash", r"(?s)optimizers/lion/seed-\d ended with status 1.*ValueError: a bug of ours"),
        ("killed", r"was ended by signal 9: out of memory\?.*--jobs"),
        ("lazy", "ended before its run did"),
    ],
)
def test_a_run_that_fails_stops_the_study(
    tmp_path: Path, others: set[int], acts: str, message: str
) -> None:
    agenda = Agenda(study_that(f"slow+{acts}", "lion", steps=100_000), {})
    with pytest.raises(RunError, match=message):
        pool_in(tmp_path).work(agenda, [Remembers()])
    assert not agenda.finished  # whoever runs beside it is not waited for, for hours
    assert all_children() <= others


@pytest.mark.parametrize(
    ("error", "acts"),
    [
        (KeyboardInterrupt, "slow"),
        (ZeroDivisionError, "slow"),
        (KeyboardInterrupt, "slow+stubborn"),
    ],
)
def test_whatever_stops_it_no_process_is_left(
    tmp_path: Path,
    others: set[int],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    acts: str,
) -> None:
    monkeypatch.setattr(pools, "_GRACE_S", 0.2 if "stubborn" in acts else pools._GRACE_S)
    agenda = Agenda(study_that(acts, "lion", steps=500), {})
    with pytest.raises(error):
        pool_in(tmp_path).work(agenda, [Remembers(error)])
    assert all_children() <= others
    # What was done is there, and is gone on from.
    steps = {name: len(record.steps) for name, record in read_records(tmp_path).items()}
    assert 1 <= max(steps.values()) < 500


class Flaky:
    """A place whose workers go away: the n-th start of a run is lost while ``losses`` says so."""

    def __init__(
        self, execution: Execution, losses: dict[str, int], checkpoints: bool = False
    ) -> None:
        self.local, self.losses, self.checkpoints = Local(execution), dict(losses), checkpoints

    def start(self, run: RunSpec, running: Sequence[Worker]) -> Worker:
        worker = self.local.start(run, running)
        if not self.losses.get(run.name):
            return worker
        self.losses[run.name] -= 1

        def lost() -> RunRecord:
            raise Lost("a machine that is gone")

        worker.result = lost  # type: ignore[method-assign]
        if self.checkpoints:
            worker.new_events = lambda: [{"event": "checkpoint", "step": 1}]  # type: ignore[method-assign]
        return worker


def test_a_run_whose_worker_is_lost_is_taken_up_again(tmp_path: Path) -> None:
    study, watcher = study_that("", "lion"), Remembers()
    name = "optimizers/lion/seed-1"
    agenda = Agenda(study, {})
    Pool(Flaky(execution_in(tmp_path), {name: 2}), 2).work(agenda, [watcher])
    assert agenda.finished
    assert [what for what, run in watcher.told if run == name] == [
        *("started", "lost") * 2,
        *("started", "ended"),
    ]
    others = [told for told in watcher.told if told[1] not in (name, "")]
    assert len(others) == len(set(others))  # nothing else was done twice


def test_a_run_that_loses_its_worker_again_and_again_is_given_up(
    tmp_path: Path, others: set[int]
) -> None:
    name = "optimizers/baseline/seed-0"
    place = Flaky(execution_in(tmp_path), {name: 9})
    with pytest.raises(RunError, match=rf"{name}: its worker was lost 3 times in a row.*is gone"):
        Pool(place, 2).work(Agenda(study_that("", "lion"), {}), [Remembers()])
    assert all_children() <= others
    # One that comes further each time is not.
    place = Flaky(execution_in(tmp_path / "further"), {name: 5}, checkpoints=True)
    (tmp_path / "further" / "runs").mkdir(parents=True)
    Pool(place, 2).work(Agenda(study_that(""), {}), [Remembers()])
    assert place.losses[name] == 0


def test_a_follower_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / RECORD
    follower = Follower(path)
    assert follower.new() == []
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert follower.new() == [{"event": "step", "step": 1}]
    assert follower.new() == []
    path.write_text('{"event": "step", "step": 1}\n')  # the torn line was cut off
    assert follower.new() == []
    with path.open("a") as file:
        file.write('{"event": "step", "step": 2}\nnonsense\n[]\n{"event": "end"}\n')
    assert [each["event"] for each in follower.new()] == ["step", "end"]
    assert Follower(path).new() == []
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    follower = Follower(path)
    path.write_text('{"event": "step", "step": 1}\n{"event": "start", "from_step": 0}\n')
    assert follower.new() == [{"event": "start", "from_step": 0}]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(DiskFullError, match=r"no room to write /tmp/x .*free some space"):
        pool_in(tmp_path).work(Agenda(study_that(""), {}), [Remembers()])


Make = Callable[[Sequence[int], str], Cores]


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Make]:
    """The cores of another study, with the folder of its locks."""
    with ExitStack() as stack:
        yield lambda processors, name: stack.enter_context(
            closing(Cores(processors, tmp_path / name))
        )


def test_a_free_core_is_taken_before_one_that_has_a_run(study: Make) -> None:
    cores = study((4, 6), "locks")
    assert cores.choose([]) == 4
    assert cores.trouble == ""
    assert cores.choose([4]) == 6
    assert cores.choose([6]) == 4
    assert cores.choose([4, 6]) == 4
    assert cores.choose([4, 6, 4]) == 6
    assert cores.choose([4, None]) == 6
    assert study((), "locks").choose([]) is None


def test_two_studies_do_not_share_a_core(study: Make) -> None:
    ours, theirs = study((0, 1), "locks"), study((0, 1), "locks")
    assert ours.choose([]) == 0
    assert theirs.choose([]) == 1
    assert ours.choose([0]) is None
    # Between two runs a core is still its study's.
    assert theirs.choose([]) == 1
    assert study((0, 1), "locks").choose([]) is None
    ours.close()
    assert theirs.choose([1]) == 0
    assert theirs.choose([0, 1, 1]) == 0


def test_without_a_place_for_locks_there_are_no_other_studies(study: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    studies = [study((0, 1), "file") for _ in range(2)]
    assert [each.choose([]) for each in studies] == [0, 0]
    for each in studies:
        assert "may share a core" in each.trouble


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def _writable_by_the_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


@pytest.mark.parametrize("put", [_fifo, _dangling, _link, _writable_by_the_group])
def test_a_folder_that_another_user_could_have_put_there_is_left_alone(
    study: Make, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    put(tmp_path / "locks")
    cores = study((0, 1), "locks")
    assert cores.choose([]) == 0
    assert str(tmp_path / "locks") in cores.trouble
    assert not [each for each in tmp_path.rglob("*") if each.name == "0"]


def test_the_folder_of_another_user_is_left_alone(
    study: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locks").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    cores = study((0,), "locks")
    assert cores.choose([]) == 0
    assert "it has owner" in cores.trouble
    assert not any((tmp_path / "locks").iterdir())


@pytest.mark.parametrize("put", [_fifo, _dangling])
def test_a_lock_that_is_no_file_neither_hangs_nor_is_followed(
    study: Make, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    (tmp_path / "locks").mkdir(mode=0o700)
    put(tmp_path / "locks" / "0")
    cores = study((0, 1), "locks")
    assert cores.choose([]) == 0
    assert str(tmp_path / "locks" / "0") in cores.trouble
    assert not (tmp_path / "locks" / "elsewhere").exists()


def test_locks_are_in_the_runtime_folder_if_it_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert lock_folder() == runtime / "tilewise" / "cores"
    runtime.chmod(0o755)
    assert runtime not in lock_folder().parents
