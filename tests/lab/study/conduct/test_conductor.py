"""A study from its config to its report, with children that only write records.

The floors of a study that really trained: computed once, stored with it, in its report.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.lab.study.conduct.conducting import Conducted, conductor_of
from tests.lab.study.in_process import page_of, quickly, run, verdicts
from tests.lab.study.records_of import experiment_of, folder_of, records_of, study_of
from tilelab.common import environment
from tilelab.common.files import DiskFullError
from tilelab.common.terminal import crowded
from tilelab.study.ask.config import Arm
from tilelab.study.conduct import conductor
from tilelab.study.conduct.conductor import complete_floors, report_again
from tilelab.study.conduct.pool import RunError
from tilelab.study.data import floors as module
from tilelab.study.data.tokens import CorruptCacheError
from tilelab.study.need import NotEnoughMemoryError
from tilelab.study.records import store
from tilelab.study.records.events import CorruptRecordError
from tilelab.study.records.store import read_floors
from tilelab.study.report import gather, write
from tilewise.errors import InvalidArgument, TilewiseError

quick_report = pytest.mark.usefixtures("quick_report")


def test_everything_is_said_done_and_written(place: Path) -> None:
    conducted = Conducted(place)
    assert conducted.go() == 0
    said = conducted.said
    order = [
        "Which choices are worth having?",
        "optimizers: baseline against lion; 2 seeds, 3 steps",
        str(conducted.folder),
        "Text: ",
        "4 runs to do, 2 at once, 1 thread each. Expected duration: about ",
        "4 of 4 runs: ",
        "no difference",
        str(conducted.folder / "report.html"),
    ]
    places = [said.index(words) for words in order]
    assert places == sorted(places)
    stored = json.loads((conducted.folder / "study.json").read_text())
    assert stored["command"] == "tilewise study run x"
    assert stored["environment"]["threads"] == 1
    with closing(sqlite3.connect(conducted.folder / "index.sqlite")) as database:
        assert database.execute("select count(*) from runs").fetchone() == (4,)
    assert "lion" in conducted.page
    assert (conducted.folder / "report.md").stat().st_size > 500
    assert conducted.go() == 0
    assert "All 4 runs are done already." in conducted.said
    assert "to do" not in conducted.said


def test_a_design_that_cannot_detect_what_it_asks_is_refused_before_its_first_run(
    place: Path,
) -> None:
    conducted = Conducted(place, spread=1.0)
    with pytest.raises(InvalidArgument, match=r"optimizers\.seeds.*detects .*--underpowered"):
        conducted.go()
    assert conducted.said == ""
    assert not conducted.out.exists()
    assert conducted.go(underpowered=True) == 0
    assert "optimizers: 2 seeds: a test needs |t| > 12.7 and detects" in conducted.said
    page = conducted.page
    assert "Holm&#39;s adjustment is over a single comparison of the study" in page
    assert "for an expected spread of 1." in page
    shutil.rmtree(conducted.folder / "runs/optimizers/lion/seed-1")
    assert conducted.go() == 0, "what has begun goes on"


@quick_report
def test_a_run_whose_record_lost_steps_is_trained_again_and_that_is_said(place: Path) -> None:
    conducted = Conducted(place)
    assert conducted.go() == 0
    record = conducted.folder / "runs/optimizers/lion/seed-0/record.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    start, *others = lines
    kept = [start, *(each for each in others if '"step": 2' not in each)]
    record.write_text("".join(kept))
    assert not conducted.records["optimizers/lion/seed-0"].done
    record.write_text("".join([*lines[:3], start.replace('"from_step": 0', '"from_step": 3')]))
    assert conducted.go() == 0
    lost = "optimizers/lion/seed-0: 1 of 3 steps are in the record. The run is trained again"
    assert lost in conducted.said
    assert conducted.said.count("is trained again") == 1
    assert all(record.done for record in conducted.records.values())


@quick_report
def test_runs_of_another_processor_are_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conducted = Conducted(place)
    assert conducted.go() == 0
    assert "Warning: of the runs" not in conducted.said
    name = next(iter(conducted.records))
    (conducted.folder / "runs" / name / "record.jsonl").unlink()
    own = environment.describe(1)
    monkeypatch.setattr(environment, "describe", lambda _: own | {"instruction_set": "sve"})
    assert conducted.go() == 0
    made = len(conducted.records) - 1
    assert f"of the runs that are done, {made} on {own['chip']} (" in conducted.said
    assert f"this is {own['chip']} (sve)" in conducted.said


@quick_report
def test_more_threads_than_cores_are_said_and_are_of_the_runs_alone(place: Path) -> None:
    before = torch.get_num_threads()
    conducted = Conducted(place)
    threads = len(os.sched_getaffinity(0)) + 1
    assert conducted.go(threads=threads) == 0
    assert f"Warning: --threads {threads} on {threads - 1} core" in conducted.said
    assert "Take at most" in conducted.said
    assert f"{threads} threads each" in conducted.said
    assert torch.get_num_threads() == before
    assert crowded(1) == ""


@quick_report
def test_a_damaged_record_is_named_and_the_others_are_reported(place: Path) -> None:
    conducted = Conducted(place)
    assert conducted.go() == 0
    record = conducted.folder / "runs/optimizers/lion/seed-0/record.jsonl"
    record.write_text("{}\n" + record.read_text())
    stream = io.StringIO()
    with pytest.raises(CorruptRecordError, match=r"seed-0/record.jsonl, line 1"):
        report_again(conducted.folder, Console(file=stream, width=120))
    said = stream.getvalue()
    assert "optimizers/lion/seed-0: its record is damaged. The report leaves it out." in said
    assert "Report: " in said


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Whoever started the tests: what a shell runs in the background is to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_reports_what_was_done_and_the_rest_goes_on(place: Path) -> None:
    conducted = Conducted(place, "slow", {"budget.steps": 30})
    threading.Thread(target=_interrupt_when_stepping, args=(conducted.folder,)).start()
    assert conducted.go() == 130
    assert "Stopped with Ctrl-C. The same command goes on from here." in conducted.said
    assert "incomplete" in conducted.said
    assert "incomplete" in conducted.page.lower()
    before = {name: len(record.steps) for name, record in conducted.records.items()}
    assert 0 < sum(before.values()) < 4 * 30
    assert conducted.go() == 0
    after = conducted.records
    assert all(len(record.steps) == 30 for record in after.values())
    # Steps that were taken are not taken again.
    resumed = [record for record in after.values() if len(record.starts) == 2]
    assert resumed
    assert all(record.starts[1].from_step > 0 for record in resumed)


def _interrupt_when_stepping(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any('"step"' in path.read_text() for path in folder.glob("runs/*/*/*/record.jsonl")):
            break
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_fails_leaves_a_report_of_the_others(place: Path) -> None:
    conducted = Conducted(place, "wrong")
    with pytest.raises(RunError, match="lion/seed-0: the text is missing: get it"):
        conducted.go(jobs=1)
    assert "Report: " in conducted.said
    assert "incomplete" in conducted.page.lower()
    assert list(conducted.records) == ["optimizers/baseline/seed-0"]


@quick_report
def test_what_is_missing_is_said_before_anything_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "available_bytes", lambda device: 10**8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    conducted = Conducted(place)
    with pytest.raises(InvalidArgument, match=r"--device.*no GPU.*--device cpu"):
        conducted.go(device="cuda")
    with pytest.raises(NotEnoughMemoryError, match=r"0\.1 GB are free"):
        conducted.go()
    assert conducted.records == {}
    monkeypatch.setattr(conductor, "available_bytes", lambda device: 5 * 10**8)
    assert conducted.go() == 0
    assert "Memory is enough for 1 of 2 runs at once" in conducted.said
    assert "one at a time" in conducted.said
    with store.locked(conducted.folder), pytest.raises(TilewiseError, match="another process"):
        conducted.go()


@quick_report
def test_a_corrupt_cache_names_its_file(place: Path) -> None:
    conducted = Conducted(place)
    assert conducted.go() == 0
    (binary,) = (place / "cache").glob("tokens-*.bin")
    binary.write_bytes(b"x" + binary.read_bytes()[1:])
    longer = Conducted(place, changes={"budget.steps": 4})
    with pytest.raises(CorruptCacheError, match=rf"{binary}.*Delete"):
        longer.go()
    assert longer.records == {}


@quick_report
def test_a_target_that_is_reached_at_once_is_an_error_now_and_later(place: Path) -> None:
    conducted = Conducted(place, target=6.0)
    with pytest.raises(InvalidArgument, match=r"optimizers\.target: got 6 bits per byte"):
        conducted.go()
    with pytest.raises(InvalidArgument, match=r"less than 5\.5"):
        conducted.go()


@quick_report
def test_a_long_study_asks_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "_LONG_S", 0.0)
    asked: list[str] = []

    def refuse(duration: str) -> bool:
        asked.append(duration)
        return False

    conducted = Conducted(place)
    assert conducted.go(confirm=refuse) == 1
    assert asked
    assert asked[0] in conducted.said
    assert not conducted.folder.exists()
    assert conducted.go(confirm=lambda duration: True) == 0


@quick_report
def test_a_full_disk_at_the_report(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise DiskFullError("no room to write index.sqlite")

    monkeypatch.setattr(store, "write_index", full)
    conducted = Conducted(place)
    with pytest.raises(DiskFullError, match="no room"):
        conducted.go()
    assert len(conducted.records) == 4
    failing = Conducted(place, "wrong")
    with pytest.raises(RunError, match="the text is missing"):  # not the later error
        failing.go(jobs=1)
    assert "The report could not be written: no room" in failing.said


@pytest.mark.parametrize(
    ("given", "jobs"),
    [({}, 3), ({"threads": 2}, 1), ({"threads": 8}, 1), ({"jobs": 5}, 5), ({"device": "cuda"}, 1)],
)
def test_jobs_by_default(
    place: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], jobs: int
) -> None:
    monkeypatch.setattr(conductor, "available_bytes", lambda device: None)
    monkeypatch.setattr(environment, "pinnable_cores", lambda: (0, 1, 2))
    ours = conductor_of(study_of(), place, **given)
    assert ours._jobs([], Console(file=io.StringIO())) == jobs


RECIPE = '''
from pathlib import Path

from tilelab.study.ask.config import *

def micro() -> Study:
    """An arm that repeats the baseline."""
    run = RunConfig(
        model=Model(layers=1, heads=2, width=16, context=16),
        data=Data(source=str(Path(__file__).with_name("text.txt")), held_out=0.1),
        training=Training(batch=2),
        budget=Budget(steps=6),
        evaluation=Evaluation(every=6, windows=4, final_stride=16),
    )
    arms = (Arm(name="same"),)
    experiment = Experiment(
        name="e", question="?", baseline=run, arms=arms, seeds=(0, 1), smallest_effect=0.05
    )
    return Study(name="micro", question="?", experiments=(experiment,))
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("floors")
    words = random.Random(0)
    (folder / "text.txt").write_text(
        "\n".join(words.choice(("the cat sat", "on a mat", "for now")) for _ in range(600))
    )
    (folder / "recipe.py").write_text(RECIPE)
    with quickly(folder):
        yield folder


def test_floors_are_computed_stored_and_shown(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = f"{trained / 'recipe.py'}:micro", trained / "out"
    status, began = run(recipe, out)
    assert (status, len(began)) == (0, 4)
    (folder,) = store.study_folders(out)
    floors = read_floors(folder)["e"]
    named = {(each.name, each.text): each for each in floors}
    seen = named["byte table of order 4", "seen"]
    # 6 steps of 2 windows of 16, each with a target that is not in a window where it ends a piece.
    assert 6 * 2 * 16 < seen.bytes_seen <= 6 * 2 * 17
    assert named["byte table of order 4", "all"].value < seen.value < 8
    (experiment,) = verdicts(out)
    (arm,) = experiment["arms"]
    assert (arm["label"], arm["learnt"], arm["neither_learnt"]) == ("no difference", False, True)
    page, twin = page_of(out), (folder / "report.md").read_text()
    for text in (page, twin.replace("\\", "")):
        assert "no difference, not learnt" in text
        assert "same has not learnt more than the byte table of order 4, nor has baseline" in text
        assert "byte table of order 4" in text
        assert "Floors" in text
    assert "Floors score all of the held-out text, the arms windows" not in page
    said = capsys.readouterr().out
    assert "e: scoring tables of counts and compressors on the held-out text." in said
    assert "no difference, not learnt" in said

    def again(*_: object) -> None:
        raise AssertionError("computed twice")

    monkeypatch.setattr(module, "_after", again)
    assert run(recipe, out) == (0, [])
    assert "scoring" not in capsys.readouterr().out, "they are in the study's folder"
    (folder / "floors.json").unlink()  # as if it had been killed before
    assert run(recipe, out) == (0, [])
    assert read_floors(folder)["e"] == floors, "they are in the cache"
    # A report needs neither the text nor the cache; without the file it has no floors.
    assert "Floors" in write(gather(folder))[1].read_text()
    (folder / "floors.json").rename(folder / "away.json")
    without = gather(folder)
    assert without.verdict.experiments[0].arms[0].label == "no difference"
    assert "learnt more" not in write(without)[1].read_text()
    (folder / "floors.json").write_text(json.dumps({"e": [{"name": "x"}]}))
    with pytest.raises(CorruptRecordError, match="not the floors of a study"):
        gather(folder)


def test_data_that_changed_has_no_floors_and_that_is_said(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = f"{trained / 'recipe.py'}:micro", trained / "changed"
    assert run(recipe, out)[0] == 0
    (folder,) = store.study_folders(out)
    (folder / "floors.json").unlink()
    text = trained / "text.txt"
    before = text.read_text()
    try:
        text.write_text(before.replace("cat", "dog"))
        assert run(recipe, out) == (0, [])
        assert "e: no floors. The data is not that of e/baseline/seed-0" in capsys.readouterr().out
        text.unlink()
        assert run(recipe, out) == (0, [])
        assert "e: no floors. data.source" in capsys.readouterr().out
    finally:
        text.write_text(before)
    assert not read_floors(folder)


def test_a_comparison_of_kernels_has_no_floors(tmp_path: Path) -> None:
    kernels = study_of(experiment_of(Arm(name="sdpa", kind="systems")))
    folder = folder_of(tmp_path / "study", kernels, records_of(kernels))
    said: list[str] = []
    complete_floors(kernels, folder, said.append)
    assert (said, read_floors(folder)) == ([], {})
    choices = study_of(experiment_of("lion"))
    complete_floors(
        choices, folder_of(tmp_path / "other", choices, records_of(choices)), said.append
    )
    assert "The data is not that of" in said[0]
