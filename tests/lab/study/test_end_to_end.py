"""Studies with real training, as a user runs them: killed, out of disk, and the same to the bit.

A process of a run takes seconds to start, so one small study is trained once, undisturbed, and what
happens to others is compared with it.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab.study.in_process import records
from tests.lab.study.train.toys import bits_of
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilewise import cli

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs Linux's /proc to see the processes of runs"
)

RECIPE = '''
from pathlib import Path

from tilelab.study.ask.config import *

def micro(*, seeds: int = 1, steps: int = 60) -> Study:
    """Two arms that learn and one that cannot, in seconds."""
    run = RunConfig(
        model=Model(layers=1, heads=2, width=16, context=16, dropout=Dropout(residual=0.1)),
        data=Data(source=str(Path(__file__).with_name("text.txt"))),
        training=Training(batch=2),
        budget=Budget(steps=steps),
        evaluation=Evaluation(every=10, windows=4),
    )
    experiment = Experiment(
        name="e",
        question="?",
        baseline=run,
        arms=(
            Arm(name="muon", changes={"optimizer.name": "muon"}),
            Arm(name="nan", changes={"optimizer": {"name": "sgd", "lr": 1e30}, "training.clip": 0}),
        ),
        seeds=tuple(range(seeds)),
        smallest_effect=0.05,
        target=0.001,
    )
    return Study(name="micro", question="?", experiments=(experiment,))
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the recipe and its text; caches go there too."""
    folder = tmp_path_factory.mktemp("end-to-end")
    words = random.Random(0)
    (folder / "text.txt").write_text(
        " ".join(words.choice(("the", "cat", "sat", "on", "a", "mat")) for _ in range(6000))
    )
    (folder / "recipe.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWISE_CACHE", str(folder / "cache"))
        yield folder


def argv(place: Path, out: str, *options: str) -> list[str]:
    return ["study", f"{place / 'recipe.py'}:micro", "--out", str(place / out), *options]


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, RunRecord]:
    """The records of the study when nothing happens to it."""
    assert cli.main(argv(place, "undisturbed")) == 0
    return records(place / "undisturbed")


def assert_same(found: dict[str, RunRecord], expected: dict[str, RunRecord]) -> None:
    assert found.keys() == expected.keys()
    for name, record in expected.items():
        assert bits_of(found[name]) == bits_of(record), name


@pytest.mark.thorough
def test_a_study_learns_decides_and_reports(
    place: Path, undisturbed: dict[str, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(undisturbed) == 3
    baseline, nan = undisturbed["e/baseline/seed-0"], undisturbed["e/nan/seed-0"]
    first, last = (baseline.evaluations[at].loss for at in (0, -1))
    assert first is not None
    assert last is not None
    assert last < first - 0.3
    # The same seed: the same first weights and batches.
    assert baseline.evaluations[0].loss == undisturbed["e/muon/seed-0"].evaluations[0].loss
    assert baseline.steps[0].loss == undisturbed["e/muon/seed-0"].steps[0].loss
    # A loss that is not a number ends its run, and nothing else.
    assert nan.diverged
    assert nan.end is not None
    assert nan.end.step < 60
    assert cli.main(argv(place, "undisturbed")) == 0
    said = capsys.readouterr().out
    assert "All 3 runs are done already." in said
    assert "nan" in said
    assert "diverged" in said
    (folder,) = store.study_folders(place / "undisturbed")
    page = (folder / "report.html").read_text()
    assert "muon" in page
    assert "diverged" in page


def started(command: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-m", "tilewise", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def steps_taken(out: Path) -> int:
    return sum(path.read_text().count('"event":"step"') for path in out.rglob("record.jsonl"))


def wait_for(condition: object, process: subprocess.Popen[str], seconds: float = 120) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


def stop(place: Path, out: str, options: list[str], how: signal.Signals, after_steps: int) -> str:
    """Run the study in a process of its own and end it so; what it said. No process is left."""
    process = started(argv(place, out, *options))
    with process:
        wait_for(lambda: steps_taken(place / out) >= after_steps, process)
        runs = children(process.pid)
        assert runs
        process.send_signal(how)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    deadline = time.monotonic() + 10
    while any(map(alive, runs)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, runs))
    return said


@pytest.mark.slow
def test_killed_and_run_again_it_is_the_same_to_the_bit(
    place: Path, undisturbed: dict[str, RunRecord]
) -> None:
    only = ["--set", "arms=muon"]
    stop(place, "killed", only, signal.SIGKILL, after_steps=25)
    assert 25 <= steps_taken(place / "killed") < 120
    assert cli.main(argv(place, "killed", *only)) == 0
    names = ("e/baseline/seed-0", "e/muon/seed-0")
    assert_same(records(place / "killed"), {name: undisturbed[name] for name in names})


@pytest.mark.slow
def test_a_full_disk_says_so_and_loses_nothing(
    place: Path, undisturbed: dict[str, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--set", "arms=baseline"]
    with largest_file(40_000):  # of a checkpoint it is too little, of a record enough
        assert cli.main(argv(place, "full", *only)) == 1
    said = capsys.readouterr().err
    assert "no room to write" in said
    assert "free some space" in said
    assert cli.main(argv(place, "full", *only)) == 0
    name = "e/baseline/seed-0"
    assert_same(records(place / "full"), {name: undisturbed[name]})


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No process that is started meanwhile can write a larger file: like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_killed_at_random_moments_it_is_the_same_to_the_bit(place: Path) -> None:
    options = ["--seeds", "2", "--underpowered", "--steps", "300"]
    assert cli.main(argv(place, "long", *options)) == 0
    moments = random.Random(1)
    for attempt in range(6):
        process = started(argv(place, "often", *options))
        with process:
            time.sleep(moments.uniform(2, 12))
            process.send_signal(signal.SIGINT if attempt % 3 == 2 else signal.SIGKILL)
            process.communicate(timeout=60)
    assert cli.main(argv(place, "often", *options)) == 0
    assert_same(records(place / "often"), records(place / "long"))


@pytest.mark.slow
def test_ctrl_c_leaves_a_report_and_no_process(
    place: Path, undisturbed: dict[str, RunRecord]
) -> None:
    said = stop(place, "interrupted", [], signal.SIGINT, after_steps=25)
    assert "Stopped with Ctrl-C" in said
    assert "incomplete" in said
    assert "Traceback" not in said
    (folder,) = store.study_folders(place / "interrupted")
    assert (folder / "report.html").exists()
    assert cli.main(argv(place, "interrupted")) == 0
    assert_same(records(place / "interrupted"), undisturbed)


@pytest.mark.slow
def test_a_checkpoint_of_another_config_is_refused(
    place: Path, undisturbed: dict[str, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = store.study_folders(place / "undisturbed")
    folder = place / "swapped" / whole.name
    shutil.copytree(whole, folder)
    record = folder / "runs/e/muon/seed-0/record.jsonl"
    # Cut off the end of the run, so that it is taken up again from its checkpoint.
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    name = "checkpoint.safetensors"
    shutil.copy(folder / "runs/e/baseline/seed-0" / name, folder / "runs/e/muon/seed-0" / name)
    assert cli.main(argv(place, "swapped")) == 1
    said = capsys.readouterr().err
    assert "e/muon/seed-0" in said
    assert "checkpoint" in said
    assert "another config" in said
