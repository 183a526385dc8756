"""The ``tilewise bench`` suites: small runs of each, records, pages, comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu.core import absence
from tilewise.lab.bench import entry, main
from tilewise.lab.bench.suites import command, compare
from tilewise.lab.bench.suites.crossover import crossing, told
from tilewise.lab.bench.suites.page import ABOUT, html, markdown
from tilewise.lab.bench.suites.point import COMPLETE, INTERRUPTED, Point, Record
from tilewise.lab.bench.suites.steps import Step

needs_core = pytest.mark.skipif(absence() is not None, reason="the compiled core is not built")

MACHINE: dict[str, Any] = {
    "chip": "Chip <9>",
    "cores": 2,
    "instruction_set": "avx2",
    "system": "Linux x86_64",
    "python": "3.11",
    "versions": {"torch": "2.13"},
    "load_average": [0.5, 1.5],
}
VOID = {"meta", "link", "br", "wbr"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Page(HTMLParser):
    """Checks that every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                assert value is not None
                assert value.startswith(("data:", "#")), f"{tag} loads {value}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_sound(text: str) -> Page:
    """The page is well-formed and loads nothing."""
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "<script" not in text
    return page


def point(length: int, method: str, seconds: float, **more: Any) -> Point:
    samples = (seconds * 0.99, seconds, seconds * 1.01)
    return Point("paper", "forward", length, "float32", method, samples=samples, **more)


def record(*points: Point) -> Record:
    return Record(["paper"], MACHINE, "cpu", {"minutes": 1}, COMPLETE, 1.0, list(points))


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """A small run of a suite; its JSON."""
    argv = [name, "--quick", "--lengths", "33,64", "--rounds", "2", "--out", str(folder)]
    assert main([*argv, "--minutes", "2", *options]) == 0
    values: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert values["status"] == COMPLETE
    assert not [p for p in values["points"] if p["status"] in ("wrong", "failed")]
    page = assert_sound((folder / f"{name}.html").read_text())
    assert "svg" in page.seen
    assert (folder / f"{name}.md").read_text().startswith("# tilewise bench")
    return values


def test_the_entry_knows_every_suite() -> None:
    assert {*command.SUITES, "all"} == set(entry.SUITES)
    assert set(command.SUITES) <= set(ABOUT)


@needs_core
def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = run("speed", tmp_path)
    found = {(p["method"], p["case"]) for p in values["points"] if p["samples"]}
    assert ("tilewise", "backward, causal") in found
    assert ("sdpa flash", "forward, full") in found
    assert ("plain, checkpointed", "backward, full") in found
    sample = next(p for p in values["points"] if p["samples"])
    assert len(sample["samples"]) == 2
    assert sample["spread"]["low"] <= sample["spread"]["median"] <= sample["spread"]["high"]
    assert values["machine"]["versions"]["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(values)
    assert "Against the fastest other exact method" in capsys.readouterr().out


@needs_core
def test_accuracy(tmp_path: Path) -> None:
    values = run("accuracy", tmp_path)
    ours = [p for p in values["points"] if p["method"] == "tilewise"]
    assert {p["case"] for p in ours} == {
        f"{direction}, {scores} scores"
        for direction in ("forward", "backward")
        for scores in ("usual", "large")
    }
    assert all(0 < p["samples"][0] <= p["allowed"] for p in ours)


@needs_core
def test_ctrl_c_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_off(_: Any) -> Iterator[Point]:
        yield replace(point(64, "tilewise", 1.0), suite="speed")
        raise KeyboardInterrupt

    steps = [Step("one", lambda _: []), Step("two", broken_off), Step("three", broken_off)]
    monkeypatch.setitem(command.SUITES, "speed", lambda _: steps)
    assert main(["speed", "--out", str(tmp_path)]) == 130
    values = Record.read(tmp_path / "speed.json")
    assert values.status == INTERRUPTED
    assert len(values.points) == 1
    assert "stopped with Ctrl-C" in (tmp_path / "speed.html").read_text()
    assert "[2/3] two" in capsys.readouterr().err


@needs_core
def test_the_time_budget_ends_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(command.SUITES, "speed", lambda _: [Step("one", lambda _: [])] * 3)
    assert main(["speed", "--out", str(tmp_path), "--minutes", "1e-9"]) == 0
    assert Record.read(tmp_path / "speed.json").status.startswith("0 of 3 steps fit")


@needs_core
def test_ours_wrong_is_exit_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = Point("speed", "forward", 64, "float32", "tilewise", status="wrong", note="out: NaN")
    monkeypatch.setitem(command.SUITES, "speed", lambda _: [Step("one", lambda _: [bad])])
    assert main(["speed", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "speed.md").read_text()
    assert "WRONG" in text
    assert "Breaks the 2x rule" in text


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["speed", "nothing"], ["speed", "--minutes", "0"], ["speed", "--lengths", "0"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    assert "no suite nothing" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="nobody"):
        main(["speed", "--models", "nobody"])


def test_a_record_comes_back(tmp_path: Path) -> None:
    before = record(point(64, "tilewise", 1.0, predicted=2.0), point(64, "x", 1.0, exact=False))
    path = tmp_path / "a" / "paper.json"
    before.write(path)
    assert Record.read(path) == before
    for text in ("{", "[]", '{"format": 1}'):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match="suite of the bench"):
            Record.read(path)


def test_the_page_is_sound_and_escapes() -> None:
    made = record(
        point(64, "tilewise", 1.0),
        point(128, "tilewise", 4.0, predicted=3.0),
        point(64, "<b>&", 2.0, exact=False, error=0.5),
        point(128, "<b>&", 3.0, exact=False, error=0.25),
        Point("paper", "forward", 64, "float32", "plain", status="skipped", note="<i>why</i>"),
    )
    text = html(made)
    page = assert_sound(text)
    assert page.seen.count("svg") == 1
    assert "<b>&" not in text
    assert "&lt;i&gt;why" in text
    assert "Chip &lt;9&gt;" in text
    assert "error 0.25" in markdown(made)
    assert "| plain | - |" in markdown(made)


def test_crossing_is_interpolated() -> None:
    exact = {128: 1.0, 256: 4.0, 512: 16.0}
    linear = {128: 2.0, 256: 4.0 * 2**0.0, 512: 8.0}
    found = crossing(exact, linear)
    assert found is not None
    assert found.at == pytest.approx(256)
    assert found.gain == pytest.approx(2)
    between = crossing(exact, {128: 2.0, 256: 2.0})
    assert between is not None
    assert between.at == pytest.approx(128 * 2**0.5)
    never = crossing(exact, {512: 17.0})
    assert never is not None
    assert never.at is None
    always = crossing(exact, dict.fromkeys(exact, 0.5))
    assert always is not None
    assert always.at == 128
    back = crossing(exact, {128: 0.5, 256: 5.0, 512: 8.0})  # what it loses again does not count
    assert back is not None
    assert 256 < (back.at or 0) < 512
    assert crossing(exact, {1: 1.0}) is None


def test_crossings_in_a_sentence() -> None:
    exact = {128: 1.0, 512: 16.0}
    ways = {
        "linear": crossing(exact, {128: 2.0, 512: 8.0}),
        "sparse": crossing(exact, {128: 0.5, 512: 2.0}),
        "slow": crossing(exact, {128: 9.0, 512: 99.0}),
    }
    text = told("forward", "ours", {name: found for name, found in ways.items() if found})
    assert text == (
        "forward: linear from about 260 on is faster than ours; sparse already at 128; "
        "slow not up to 512."
    )
    few = {name: found for name, found in ways.items() if found and name != "linear"}
    assert told("forward", "ours", few).startswith("forward: faster than ours: sparse already")


def test_compare_flags_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = record(point(64, "tilewise", 1.0), point(64, "sdpa", 1.0), point(64, "old", 1.0))
    after = record(point(64, "tilewise", 1.5), point(64, "sdpa", 1.01), point(64, "new", 1.0))
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for each, path in zip((before, after), paths, strict=True):
        each.write(Path(path))
    assert main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert "slower" in text
    assert "1 of 2 points moved" in text
    assert "In one file only: 1 of the first, 1 of the second" in text
    assert "sdpa" not in text
    assert main(["compare", *paths, "--all", "--check"]) == 1
    assert "sdpa" in capsys.readouterr().out
    assert main(["compare", *reversed(paths), "--check"]) == 0
    assert "faster" in capsys.readouterr().out


def test_noise_widens_with_the_spread() -> None:
    steady, loose = (replace(point(64, "x", 1.0), samples=s) for s in ((1, 1, 1.0), (0.5, 1, 2.0)))
    assert compare.noise(steady) == 0
    assert compare.noise(loose) > 0.3
    moved = compare.Moved(loose, 1.0, 1.2, 0.5)
    assert moved.word == ""
    assert replace_noise(moved, 0.03).word == "slower"


def replace_noise(moved: compare.Moved, noise: float) -> compare.Moved:
    return moved._replace(noise=noise)


def test_stored_runs_of_the_cases_with_goals_compare(capsys: pytest.CaptureFixture[str]) -> None:
    stored = sorted(Path(__file__).parents[3].glob("benchmarks/*/cpu.json"))
    assert stored
    assert main(["compare", str(stored[0]), str(stored[0]), "--check"]) == 0
    assert "0 of" in capsys.readouterr().out


def test_a_stored_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paper.json"
    record(point(64, "tilewise", 1.0), point(128, "tilewise", 2.0)).write(path)
    assert main(["show", str(path), "--markdown"]) == 0
    assert "| tilewise |" in capsys.readouterr().out
    assert_sound(path.with_suffix(".html").read_text())
