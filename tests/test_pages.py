"""Every block of Python on a page runs, and every command on a page is one that there is."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.blocks import (
    BLOCKS,
    PLACES,
    ROOT,
    TEXTS,
    block_of,
    executed_by_tests,
    executes,
    run,
)
from tests.conftest import ran
from tilewise import cli

# Blocks that another test runs, with more around them or beside a library: its decorator says so.
ELSEWHERE = {(page, number): file for page, number, file in executed_by_tests()}


@pytest.mark.parametrize("page", sorted({page for page, _ in PLACES - ELSEWHERE.keys()}))
def test_the_blocks_of_a_page_run(page: str) -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        left = [each for each in BLOCKS if each.page == page and each[:2] not in ELSEWHERE]
        names = run(left, {})
    if page == "README.md":
        assert "backend" in said.getvalue()
        assert names["table"].grad.abs().sum() > 0
    elif page == "docs/serving.md":
        assert [len(each) for each in names["tokens"]] == [20, 5]
    elif page == "docs/model-libraries.md":
        took = [names["version_3"].flash_attn_func, names["version_4"].flash_attn_func]
        took += [names["flash_attn_func"], names["xops"].memory_efficient_attention]
        assert all(each.__module__.startswith("tilewise.compat.") for each in took)
        assert said.getvalue().endswith("\ntilewise\n")
    elif page == "docs/studies.md":
        assert names["verdict"].label == "better"
    elif page == "docs/tour.md":
        assert "True\n" in said.getvalue()
        assert "1 of 1 calls taken" in said.getvalue()
        assert names["verdict"].label == "worse"


def is_python(code: str) -> bool:
    """Whether some text is Python that does something."""
    try:
        found = ast.walk(ast.parse(code))
    except SyntaxError:
        return False
    return any(isinstance(each, ast.Call | ast.Assign | ast.Import) for each in found)


def test_every_block_is_run_somewhere() -> None:
    assert len(BLOCKS) > 40
    assert ELSEWHERE.keys() <= PLACES
    # The step that has the libraries runs these files; elsewhere they are skipped.
    step = (ROOT / ".ci/run").read_text()
    for place, file in ELSEWHERE.items():
        assert not file.startswith("tests/integrations/") or file in step, (place, file)
    for page, text in TEXTS.items():
        kinds = set(re.findall(r"^```(\S+)$", text, re.M))
        assert kinds <= {"python", "py", "{toctree}", "{eval-rst}"}, page
        # Nobody would run Python in a block without a language, or Python that is indented.
        for plain in re.findall(r"^```\n(.*?)^```", text, re.M | re.S):
            assert not is_python(plain), f"{page}: {plain}"
        indented = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        assert not re.findall(r"^    (?:import|from) .*", indented, re.M), page


def test_a_test_that_leaves_its_block_out_fails() -> None:
    page = "docs/gallery.md"

    @executes(page, 0)
    def one(*numbers: int) -> None:
        for number in numbers:
            run([block_of(page, number)], {})

    one(0)
    for others in ((), (9,)):  # what ran before does not count
        with pytest.raises(AssertionError, match=r"one does not execute block \[0\] of docs"):
            one(*others)
    with pytest.raises(AssertionError, match=r"has no block \[99\]"):
        executes(page, 99)


def test_the_notebook_is_the_tour() -> None:
    """Its cells are the page's blocks. tests/test_site.py runs it in a kernel."""
    made = runpy.run_path(str(ROOT / "scripts/notebook.py"))["notebook"](TEXTS["docs/tour.md"])
    stored = (ROOT / "docs/tour.ipynb").read_text()
    assert made == stored, "python scripts/notebook.py makes it again"
    cells = json.loads(stored)["cells"]
    install, *code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["metadata"]["tags"] == ["install"]
    assert "%pip install" in install
    assert code == [each.code.strip() for each in BLOCKS if each.page == "docs/tour.md"]
    assert not any(cell.get("outputs") for cell in cells)


# ---- commands


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each line of a page that is a command, as words, with its page."""
    for page, text in TEXTS.items():
        fenced = re.findall(r"^```(\S*)\n(.*?)^```", text, re.M | re.S)
        plain = [code for kind, code in fenced if not kind]
        other = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        for line in "".join([*plain, *re.findall(r"^    (.*\n)", other, re.M)]).splitlines():
            start = re.match(r"(?:[A-Z_]+=\S+ )*(?:bash |\S*python3? )?(\S+)", line.strip())
            if start and re.match(r"\./run$|tilewise$|\S*/tilewise$|scripts/|\.ci/|-m$", start[1]):
                words = shlex.split(line[line.index(start[1]) :].split("&&")[0], comments=True)
                yield page, words


@pytest.fixture(scope="module")
def options() -> Mapping[str, str]:
    """What ``tilewise COMMAND --help`` says, and for a study what recipes say, by command."""
    found = {}
    for command in ("doctor", "explain", "study", "demo", "bench", "tune"):
        said = io.StringIO()
        with redirect_stdout(said), pytest.raises(SystemExit):
            cli.main([command, "--help"])
        found[command] = said.getvalue()
    said = io.StringIO()
    with redirect_stdout(said):
        cli.main(["study", "recipes"])
    found["study"] += said.getvalue()
    return found


def test_every_command_is_there(options: Mapping[str, str]) -> None:
    seen = 0
    ours = (ROOT / "run").read_text()
    for page, (program, *words) in commands():
        shown = f"{page}: {program} {' '.join(words)}"
        seen += 1
        if program == "-m":
            assert importlib.util.find_spec(words[0]), shown
        elif "/" in program and program not in ("./run", ".venv/bin/tilewise"):
            assert (ROOT / program).is_file(), shown
        elif program == "./run" and words[0] not in options:
            assert words[0] == "tilewise" or f"./run {words[0]}" in ours, shown
        else:
            assert words[0] in options, shown
            for word in words if words[0] in ("doctor", "explain", "tune") else ():
                assert not word.startswith("--") or word.split("=")[0] in options[words[0]], shown
    assert seen > 60


def test_every_extra_is_there() -> None:
    projects = [tomllib.loads((ROOT / f"{at}pyproject.toml").read_text()) for at in ("", "lab/")]
    known = {each for project in projects for each in project["project"]["optional-dependencies"]}
    named = {
        extra
        for text in TEXTS.values()
        for extra in re.findall(r"pip install '(?:\.|tilewise|tilelab)\[(\w+)\]'", text)
    }
    assert named
    assert named <= known
    listed = set(re.findall(r"^\| `(\w+)` \|", TEXTS["docs/install.md"], re.M))
    assert listed == set(projects[0]["project"]["optional-dependencies"])


# ---- The examples and the gallery of masks run as they are, and check themselves.


FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


QUICK = ("alibi",)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=() if file.stem in QUICK else pytest.mark.slow, id=file.stem)
        for file in EXAMPLES
    ],
)
def test_an_example_runs(file: Path) -> None:
    done = ran(sys.executable, file)
    assert done.stdout.strip(), "it says what it found"


def test_every_example_is_in_the_table() -> None:
    listed = (FOLDER / "README.md").read_text()
    missing = [file.name for file in EXAMPLES if f"[{file.name}]({file.name})" not in listed]
    assert EXAMPLES
    assert not missing, f"examples/README.md does not list {missing}"


SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gallery.py"


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_every_mask_of_the_gallery_lets_some_pairs_attend(gallery: dict[str, Any]) -> None:
    pictures = {name: gallery["picture"](mask) for name, mask in gallery["GALLERY"].items()}
    for name, picture in pictures.items():
        assert 0.02 < picture.float().mean() < 0.7, name
        assert picture.any(1).all(), f"{name}: every row sees a key"
    assert torch.equal(pictures["Causal"], torch.ones(48, 48).tril().bool())
    differ = {tuple(picture.flatten().tolist()) for picture in pictures.values()}
    assert len(differ) == len(pictures)


def test_the_gallery_is_drawn_the_same_every_time(gallery: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gallery["draw"](tmp_path / "gallery.svg")
    gallery["draw_each"](tmp_path / "gallery")
    gallery["draw_schedules"](tmp_path / "schedules.svg")
    drawn = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.svg")}
    docs = SCRIPT.parents[1] / "docs"
    stored = [docs / "gallery.svg", docs / "schedules.svg", *(docs / "gallery").iterdir()]
    kept = {path.relative_to(docs): path.read_bytes() for path in stored}
    differ = sorted(
        str(path) for path in drawn.keys() | kept.keys() if drawn.get(path) != kept.get(path)
    )
    assert not differ, f"run scripts/gallery.py, which draws {differ}; delete what it does not"
    page = (docs / "gallery.md").read_text()
    shown = set(re.findall(r"^!\[(.*?)\]\((.*?)\)$", page, re.MULTILINE))
    titles = gallery["GALLERY"].keys() | gallery["SCORES"].keys()
    assert {title for title, _ in shown} == titles, "a section shows its picture by its own title"
    others = {"gallery.svg", "schedules.svg"}
    assert {path for _, path in shown} | others == {str(path) for path in drawn}
