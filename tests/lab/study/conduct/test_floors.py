"""The floors of a study that really trained: computed once, stored with it, in its report."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.study.in_process import page_of, quickly, run, verdicts
from tests.lab.study.records_of import experiment_of, folder_of, records_of, study_of
from tilelab.study.ask.config import Arm
from tilelab.study.conduct.floors import complete
from tilelab.study.data import floors as module
from tilelab.study.records import store
from tilelab.study.records.events import CorruptRecordError
from tilelab.study.records.floors import read_floors
from tilelab.study.report import gather, write

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
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("floors")
    words = random.Random(0)
    (folder / "text.txt").write_text(
        "\n".join(words.choice(("the cat sat", "on a mat", "for now")) for _ in range(600))
    )
    (folder / "recipe.py").write_text(RECIPE)
    with quickly(folder):
        yield folder


def test_floors_are_computed_stored_and_shown(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = f"{place / 'recipe.py'}:micro", place / "out"
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
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = f"{place / 'recipe.py'}:micro", place / "changed"
    assert run(recipe, out)[0] == 0
    (folder,) = store.study_folders(out)
    (folder / "floors.json").unlink()
    text = place / "text.txt"
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
    complete(kernels, folder, said.append)
    assert (said, read_floors(folder)) == ([], {})
    choices = study_of(experiment_of("lion"))
    complete(choices, folder_of(tmp_path / "other", choices, records_of(choices)), said.append)
    assert "The data is not that of" in said[0]
