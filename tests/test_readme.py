"""The documents tell the truth: numbers are the stored ones, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ran
from tilelab.bench.steps import Point, SuiteRecord
from tilelab.counted.cases import Row
from tilelab.gpu_check.record import Record as GpuRecord
from tilelab.gpu_check.record import rate
from tilelab.study import recipes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(page for folder in ("docs", "notes") for page in sorted((ROOT / folder).glob("*.md"))),
]


def test_links_and_paths_exist() -> None:
    """In all pages at once: cases would be sampled."""
    for page in PAGES:
        text = page.read_text()
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        # Also what is named as code and looks like a path of the repository.
        links += re.findall(r"`((?:src|csrc|tests|docs|notes|scripts|\.ci)/[\w./]+\w)`", text)
        links = [link for link in links if "NAME" not in link]  # a placeholder
        missing = [
            link
            for link in links
            if not any((base / link).exists() for base in (page.parent, ROOT))
        ]
        assert missing == [], page


def test_tables_and_pictures_are_the_stored_ones() -> None:
    for script in ("readme_table", "readme_pictures"):
        ran(sys.executable, ROOT / f"scripts/{script}.py", "--check")


def test_the_numbers_of_the_readme_are_the_stored_ones() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    stored = json.loads((ROOT / "benchmarks/amd-epyc-26-2/cpu.json").read_text())
    older = json.loads((ROOT / "benchmarks/amd-epyc-25-17/cpu.json").read_text())
    ratios, before = (
        {(c["name"], c["dtype"]): c["summary"]["ratio"] for c in record["cases"]}
        for record in (stored, older)
    )
    case = "forward full 2k D64", "bfloat16"
    said = f"forward at 2,048 tokens is {ratios[case]:.1f} times as fast as torch's on a Zen 5"
    assert f"{said}, {before[case]:.1f} times on a Zen 4" in text
    case = "window 256 at 2k", "float32"
    said = f"in float32, is {ratios[case]:.0f} times as fast as torch with a mask on a Zen 5"
    assert (
        f"window of 256 keys at 2,048 tokens, {said}, {before[case]:.1f} times on a Zen 4" in text
    )
    modules = json.loads((ROOT / "benchmarks/amd-epyc-25-17/modules.json").read_text())["runs"]
    loss = next(run for run in modules if run["module"] == "loss")  # the first case
    assert (loss["case"], loss["dtype"]) == (
        "2,048 tokens, width 768, 32,000 words",
        "torch.float32",
    )
    ours, plain = (loss["peak_bytes"][side] / 1e6 for side in ("tilewise", "plain"))
    assert f"{ours:.0f} MB beyond the operands, where plain code takes {plain:.0f} MB" in text
    took = [statistics.median(loss["samples"][side]) for side in ("tilewise", "plain")]
    assert 0.95 < took[0] / took[1] < 1.0  # "and as long"
    narrow = json.loads((ROOT / "benchmarks/amd-epyc-25-17-avx2/cpu.json").read_text())
    found = [case["summary"]["ratio"] for case in narrow["cases"]]
    said = f"is {min(found):.1f} to {max(found):.0f} times as fast as torch in {len(found)} cases"
    assert f"With AVX2 alone, tilewise {said}" in text
    lists = SuiteRecord.read(ROOT / "benchmarks/amd-epyc-25-17/suites/lists.json")
    times = {
        each.method: each.median or math.nan
        for each in lists.points
        if (each.case, each.length) == ("forward, 1 of 16 keys", 32768)
    }
    saved = times["tilewise, all keys"] / times["tilewise"]
    assert f"Reading 2,048 of 32,768 keys by a list is {saved:.0f} times as fast" in text
    wanted = {"name": "forward 16k D64", "dtype": "float32", "side": "ours"}
    (memory,) = [each for each in stored["memory"] if wanted.items() <= each.items()]
    beyond = (memory["extra_bytes"] - memory["result_bytes"]) / 1e6
    assert f"at 16,384 tokens holds {beyond:.1f} MB beyond its operands and its result" in text
    counts = json.loads((ROOT / "benchmarks/cachegrind/counted.json").read_text())["rows"]
    worst = max(abs(Row.read(each).off) for each in counts)
    assert f"within {100 * worst:.1f} % of the bytes that cachegrind counts" in text


def test_the_figures_of_a_gpu_are_the_stored_ones() -> None:
    text = (ROOT / "README.md").read_text()
    stored = GpuRecord.read(ROOT / "benchmarks/nvidia-h200/gpu_check.json")
    rows = {row.name: row for row in stored.rows}
    said = []
    for direction in ("forward", "backward"):
        row = rows[f"{direction} D128 causal 16384"]
        ours, cudnn, flex = (
            each.median for name in ("ours", "cudnn", "flex") if (each := rate(row, name))
        )
        said.append((ours, ours / cudnn, ours / flex))
    (forward, over_cudnn, over_flex), (backward, *back) = said
    assert f"{forward:.0f} forward, {over_cudnn:.2f} times cuDNN" in text
    assert f"and {over_flex:.2f} times compiled FlexAttention" in text
    assert f"{backward:.0f} backward, {back[0]:.2f} times cuDNN and {back[1]:.2f} times" in text
    step = rows["GPT-2 small"].values["samples_s"]
    plain, sdpa, ours = (statistics.median(step[name]) for name in ("plain", "sdpa", "tilewise"))
    assert f"is {plain / ours:.2f} times as fast as with plain attention" in text
    assert f"{sdpa / ours:.2f} times as fast as with torch's SDPA" in text


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert lines.index("```python") < 35


def _script() -> Any:
    """scripts/readme_table.py as a module."""
    spec = importlib.util.spec_from_file_location("made", ROOT / "scripts/readme_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_stored_suites_are_told_with_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = _script()
    monkeypatch.setattr(script, "ROOT", tmp_path)
    folder = tmp_path / "benchmarks" / "chip" / "suites"
    record = SuiteRecord.begin(["accuracy"], "cpu", {})
    place = Point("accuracy", "forward", 64, "float32", "tilewise", "error")
    point = replace(place, samples=(1.0,), allowed=4.0)
    record.points.append(point)
    record.end("accuracy: 1 of 2 steps fit into the time", 3.0)
    record.write(folder / "accuracy.json")
    (folder / "accuracy-0.svg").touch()
    (section,) = script.suites(folder)
    assert section.startswith("### accuracy\n")
    assert "([tables](chip/suites/accuracy.md))" in section
    assert "Not everything is here: accuracy: 1 of 2 steps" in section
    assert "- Largest share of the allowed error that was used: tilewise 25%." in section
    assert section.endswith("![accuracy](chip/suites/accuracy-0.svg)")


def test_the_verdicts_of_a_report_are_shown_with_their_questions() -> None:
    script = _script()
    experiment = (
        "### Is it?\n\n**It is.**\n\n| arm |\n| --- |\n| lion |\n\n- **lion**: as said.\n\n"
    )
    report = f"# Q?\n\nStudy **laptop**.\n\n## Verdicts\n\n{experiment}\n## Evidence\n\n| no |\n"
    shown = script.verdicts(report)
    lines = [line for line in shown.splitlines() if line]
    assert lines[:-1] == [
        "Study **laptop**.",
        "**Is it?**",
        "It is.",
        "| arm |",
        "| --- |",
        "| lion |",
    ]
    assert "benchmarks/studies/laptop/report.md" in lines[-1]
    marks = ("<!-- studied: begin (by) -->", "<!-- studied: end -->")
    page = f"a\n{marks[0]}\nold\n{marks[1]}\nb"
    assert script.filled(page, "studied", "new") == f"a\n{marks[0]}\nnew\n{marks[1]}\nb"
    assert script.filled(page, "measured", "new") == page


def test_the_design_names_every_room_of_the_study_and_every_variable() -> None:
    design = (ROOT / "docs/design.md").read_text()
    rooms = [path.parent.name for path in (ROOT / "lab/src/tilelab/study").glob("*/__init__.py")]
    assert len(rooms) > 5
    assert [room for room in rooms if f"{room}/" not in design] == []
    sources = [ROOT / "run", *(ROOT / "src").rglob("*.py"), *(ROOT / "lab/src").rglob("*.py")]
    # In Python a variable is a string of its own; a macro of generated code is not.
    quoted, bare = r"[\"'](TILEWISE_[A-Z_]+)[\"']", r"\b(TILEWISE_[A-Z_]+)\b"
    variables = {
        name
        for path in sources
        for name in re.findall(quoted if path.suffix else bare, path.read_text())
    }
    assert "TILEWISE_STUDIES" in variables
    assert sorted(name for name in variables if f"`{name}`" not in design) == []


def test_every_recipe_is_in_the_changelog() -> None:
    names = recipes.names()
    assert "laptop" in names
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in names if f"`{name}`" not in changes] == []
