"""The table and the JSON, from a record that was made up.

docs/gpu.md names every chip, every module of the backend and every step of the check.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.lab.gpu_check.records import speed_row, timed_case, whole
from tilelab.gpu_check import main
from tilelab.gpu_check.record import Record, Row, best, rate, table
from tilelab.gpu_check.worker import MORE_STEPS, STEPS
from tilewise.errors import InvalidArgument
from tilewise.kernels.gpu.config import FAMILIES

SHORT = 11_000  # what a reply of the machine carries, with something to spare


def line_of(text: str, start: str) -> str:
    """The one line that begins with these words."""
    (found,) = [line for line in text.splitlines() if line.startswith(start)]
    return found


def test_everything_is_in_the_table() -> None:
    text = table(whole())
    assert text.startswith("Chip 9, torch 2.11, Triton 3.6.0; 102 s\n")
    assert line_of(text, "Ceiling, matrix product") == (
        "Ceiling, matrix product: 800 TFLOP/s [800, 800]"
    )
    assert line_of(text, "case").split() == [
        *("case", "ours", "+-", "%", "cudnn", "flash", "effic", "flex", "plain", "goal", "met")
    ]
    causal = line_of(text, "fwd D128 causal 16k").split()
    assert causal[:4] == ["fwd", "D128", "causal", "16k"]
    assert causal[4:] == ["410", "2%", "51", "590", "390", "40", "400", "yes"]
    assert line_of(text, "bwd D128 causal 8k").endswith("290,flex no: rate, flex")
    assert line_of(text, "fwd D64 causal 512").split()[-1] == "40"  # no goal, no verdict
    assert line_of(text, "GPT-2 small 1024").split() == [
        *("GPT-2", "small", "1024", "41", "(8.0)", "82", "(4.0)", "164", "(2.0)", "4.00", "2.00")
    ]
    assert line_of(text, "Host") == "Host, microseconds a call: forward 30; torch 20"
    assert line_of(text, "Kernel launches") == "Kernel launches: forward 2"
    assert line_of(text, "graph of both") == "graph of both passes: replay 10 us, call 90 us"
    assert line_of(text, "Memory") == (
        "Memory beyond results, forward: 1.0, 2.0 MB at N = 4k, 8k; plain 500 MB at 4k"
    )
    assert line_of(text, "accuracy") == "accuracy: 5 ok; 0 s; at worst 0.40 of the allowed error"


def test_the_table_is_short() -> None:
    record = whole()
    record.rows += [
        Row("accuracy", f"long {i}", "error", f"{i} " + "words " * 50) for i in range(90)
    ]
    record.rows += [
        Row("long", f"job {i}", "unsupported", f"{i} " + "why " * 90) for i in range(90)
    ]
    text = table(record)
    assert len(text) < SHORT
    assert max(len(line) for line in text.splitlines()) <= 200
    assert "... and 78 other reasons in the JSON" in text


def test_failures_and_refusals_are_named() -> None:
    record = whole()
    record.rows += [
        Row("accuracy", "one", "wrong", "out: 3 times"),
        *(Row("speed", f"case {i}", "unsupported", "no fp8") for i in range(3)),
        *(Row("long", f"job {i}", "skipped", "no time was left") for i in range(4)),
    ]
    text = table(record)
    assert line_of(text, "WRONG") == "WRONG accuracy, one: out: 3 times"
    assert line_of(text, "unsupported") == "unsupported speed, case 0 and 2 more: no fp8"
    assert line_of(text, "SKIPPED") == "SKIPPED for want of time: 4 jobs of long"


def test_a_wrong_case_shows_no_speed_of_ours() -> None:
    record = whole()
    row = speed_row(timed_case("full", 128, 16384), rates={"cudnn": 600.0})
    record.rows = [replace(row, status="wrong", note="out: 9 times")]
    cells = line_of(table(record), "fwd D128 full 16k").split()
    assert cells == ["fwd", "D128", "full", "16k", "-", "600", "450", "WRONG"]


def test_a_self_test_claims_no_numbers() -> None:
    record = whole()
    record.self_test = True
    text = table(record)
    assert "no number is a measurement" in text
    assert "fwd D128" not in text
    assert "Ceiling" not in text
    assert "speed: " in text


def test_json_and_back(tmp_path: Path) -> None:
    record, path = whole(), tmp_path / "deep" / "check.json"
    record.rows.append(Row("accuracy", "bad", "wrong", "NaN", {"ratios": {"out": float("inf")}}))
    record.write(path)
    values = json.loads(path.read_text())
    assert values["format"] == Record.FORMAT
    said = {each["name"]: each for each in values["summary"]}
    assert said["forward D128 causal 16384"]["met"] == "yes"
    assert values["rows"][-1]["values"]["ratios"] == {"out": None}
    again = Record.read(path)
    assert table(again) == table(record)
    assert [path.name for path in path.parent.iterdir()] == ["check.json"]


def test_a_stored_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "check.json"
    record = whole()
    record.write(path)
    assert main(["--from", str(path)]) == 0
    assert capsys.readouterr().out == table(record)
    record.rows.append(Row("speed", "x", "error", "it broke"))
    record.write(path)
    assert main(["--from", str(path)]) == 1
    record.rows.pop()
    record.status = "interrupted after 9 s"
    record.write(path)
    assert main(["--from", str(path)]) == 1
    assert "NOT EVERYTHING IS HERE" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="format"):
        Record.read(path)


ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
BACKEND = ROOT / "src" / "tilewise" / "kernels" / "gpu"


def test_every_chip_has_its_row() -> None:
    rows = re.findall(
        r"^\| (\w+) \| .* \| (yes|no.*) \| (yes.*|no.*) \| (yes|no.*) \|$", PAGE, re.M
    )
    assert [name for name, *_ in rows] == [each.name for each in FAMILIES.values() if each.maker]


def test_what_is_measured_is_stored() -> None:
    """A chip that the page calls measured has results under benchmarks/."""
    stored = list((ROOT / "benchmarks").glob("*/gpu_check.json"))
    measured = re.findall(r"^\| \w+ \| .* \| yes.* \| yes \|$", PAGE, re.M)
    assert bool(stored) == bool(measured)
    assert ("None is measured so far" in PAGE) == (not stored)


KINDS = {"ALiBi": "alibi", "documents": "document", "window": "window", "packed": "varlen"}


def test_the_figures_of_the_page_are_the_stored_ones() -> None:
    record = Record.read(ROOT / "benchmarks" / "nvidia-h200" / "gpu_check.json")
    stored = {row.name: row for row in record.rows if row.step == "speed"}
    lines = re.findall(r"^\| D (\d+)(?:, )?(.*?) \| (.*) \|$", PAGE, re.M)
    assert len(lines) == 10
    for width, words, cells in lines:
        kind = KINDS.get(words.partition(" ")[0].rstrip(","), words or "full")
        found = []
        for direction in ("forward", "backward"):
            row = stored[f"{direction} D{width} {kind} 16384"]
            ways = best(row), rate(row, "cudnn"), rate(row, "flex")
            found += [f"{each.median:.0f}" if each else "" for each in ways]
        assert [cell.strip() for cell in cells.split("|")] == found


def test_every_step_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \| ", PAGE, re.M)
    more = {step.name for step in MORE_STEPS}
    assert more < set(explained)
    assert [name for name in explained if name not in more] == [step.name for step in STEPS]


def test_every_module_is_there() -> None:
    before, heading, _ = PAGE.partition("\n## A new family of chips\n")
    assert heading
    named = set(re.findall(r"`(\w+)\.py`", before))
    modules = [path for path in BACKEND.rglob("*.py") if path.parent.name != "gate"]
    assert named == {path.stem for path in modules} - {"__init__"}
