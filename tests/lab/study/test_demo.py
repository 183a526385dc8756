"""``tilewise demo`` as a user runs it, with a text of one's own and a model of a few weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilewise import cli

SMALL = ("--context", "32", "--steps", "4", "--seeds", "1", "--long-context", "64")
SMALLER = (
    *("model.layers=1", "model.heads=2", "model.width=16"),
    *("kernels.arms=tilewise,rounding", "kernels.evaluation.sample_tokens=24"),
)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text file; caches and studies go beside it."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEWISE_STUDIES", str(tmp_path / "studies"))
    words = random.Random(0)
    path = tmp_path / "my text.txt"
    path.write_text(" ".join(words.choice(("tile", "wise", "row", "key")) for _ in range(5000)))
    return path


@pytest.mark.slow
def test_the_demo_compares_kernels_and_reports(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [word for change in SMALLER for word in ("--set", change)]
    argv = ["demo", "--text", str(text), *SMALL, *changes]
    assert cli.main(argv) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Expected duration" in said
    assert "rounding alone: " in said
    assert "my text.txt" in said

    (folder,) = store.study_folders(store.studies_folder())
    every = store.read_records(folder)
    assert {name for name in every if name.startswith("long/")} == {
        "long/sdpa/seed-0",
        "long/tilewise/seed-0",
    }
    records = {name.split("/")[1]: each for name, each in every.items() if "kernels/" in name}
    assert records.keys() == {"plain", "tilewise", "rounding"}
    ran = {arm: record.kernels for arm, record in records.items()}
    assert {arm: each.layers[0].kernel.split()[0] for arm, each in ran.items() if each} == {
        "plain": "plain",
        "tilewise": "tilewise",
        "rounding": "plain",
    }
    ends = {arm: record.end.weights_sha256 for arm, record in records.items() if record.end}
    assert len(set(ends.values())) == 3
    for arm in ("tilewise", "rounding"):
        pairs = zip(losses(records[arm]), losses(records["plain"]), strict=True)
        assert all(abs(mine - theirs) <= 1e-5 * theirs for mine, theirs in pairs), arm
    samples = {record.sample for record in records.values()}
    assert len(samples) == 1, "kernels that agree write the same"
    (sample,) = samples
    assert sample is not None
    assert 0 < len(sample.text) <= 24  # two bytes may be one character
    page = (folder / "report.html").read_text()
    assert "What the models write" in page
    assert "<h3>plain, tilewise and rounding</h3>" in page
    assert "One step at context 64" in page
    assert "rounding alone" in page
    assert "my text.txt" in page

    assert cli.main(argv) == 0
    assert "All 5 runs are done already." in capsys.readouterr().out


def losses(record: RunRecord) -> list[float]:
    """Of training, step by step."""
    found = [step.loss for step in record.steps if step.loss is not None]
    assert len(found) == 4
    return found


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "or a path that exists"),
        (b"", "text for both training and evaluation"),
        (b"ELF\0\1\2", "which is not text"),
    ],
)
def test_a_wrong_text_is_a_clear_error(
    text: Path, content: bytes | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = text.with_name("wrong.txt")
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["demo", "--text", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tilewise demo: data.source: got ")
    assert "wrong.txt" in said
    assert complaint in said
    assert store.study_folders(store.studies_folder()) == []
