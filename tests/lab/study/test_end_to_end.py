"""Studies with real training, as a user runs them: they learn, and a kill changes no bit.

Each other way to stop one, a full disk and a swapped checkpoint among them, is tested where it is
handled: ``train/test_session.py``, ``train/test_child.py``, ``conduct/``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab.study.in_process import records
from tests.lab.study.train.toys import bits_of
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilewise import cli

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


def assert_same(found: dict[str, RunRecord], expected: dict[str, RunRecord]) -> None:
    assert found.keys() == expected.keys()
    for name, record in expected.items():
        assert bits_of(found[name]) == bits_of(record), name


@pytest.mark.thorough
def test_a_study_learns_decides_and_reports(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv(place, "undisturbed")) == 0
    found = records(place / "undisturbed")
    assert len(found) == 3
    baseline, nan = found["e/baseline/seed-0"], found["e/nan/seed-0"]
    first, last = (baseline.evaluations[at].loss for at in (0, -1))
    assert first is not None
    assert last is not None
    assert last < first - 0.3
    # The same seed: the same first weights and batches.
    assert baseline.evaluations[0].loss == found["e/muon/seed-0"].evaluations[0].loss
    assert baseline.steps[0].loss == found["e/muon/seed-0"].steps[0].loss
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
    """Its children and theirs: a run is a fork of one."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(child) for child in listed.read_text().split()] if listed.exists() else []
    return [each for child in own for each in (child, *children(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs Linux's /proc to see the processes of runs"
)
def test_killed_at_random_moments_it_is_the_same_to_the_bit(place: Path) -> None:
    options = ["--seeds", "2", "--underpowered", "--steps", "300"]
    assert cli.main(argv(place, "long", *options)) == 0
    moments = random.Random(1)
    for attempt in range(6):
        process = started(argv(place, "often", *options))
        with process:
            time.sleep(moments.uniform(2, 12))
            how = signal.SIGINT if attempt % 3 == 2 else signal.SIGKILL
            runs = children(process.pid)
            process.send_signal(how)
            said, _ = process.communicate(timeout=180)
        assert process.returncode in (0, 130 if how == signal.SIGINT else -how)
        assert "Traceback" not in said
        deadline = time.monotonic() + 10
        while any(map(alive, runs)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(alive, runs)), "a process is left"
    assert cli.main(argv(place, "often", *options)) == 0
    assert_same(records(place / "often"), records(place / "long"))
