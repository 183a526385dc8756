"""The demo's report: complete, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tilewise.lab.demo import report, words
from tilewise.lab.demo.chart import Axis, Line, decades, draw, linear
from tilewise.lab.demo.contest import Arm, line_up
from tilewise.lab.demo.corpus import Corpus
from tilewise.lab.demo.longtable import IMPLEMENTATIONS, Cell
from tilewise.lab.demo.record import COMPLETE, Record
from tilewise.lab.demo.settings import Settings

EVIL = "</pre><script>alert('x')</script>&"


def _record(out: Path, steps: int = 30, **changes: Any) -> Record:
    settings = Settings(steps=steps, out=out, long_contexts=(2048, 4096))
    arms = line_up(settings)
    for arm in arms:
        slow = 1.0 if arm.implementation == "plain" else 0.4
        arm.losses = [5.5 - 0.1 * step for step in range(steps)]
        arm.wall_s, arm.cpu_s = [0.2 * slow] * steps, [0.39 * slow] * steps
        arm.peak_bytes, arm.saved_bytes = int(6e8 * slow), int(3e8 * slow)
        arm.held_out, arm.sample = 2.61, "def f(x):\n    return <x> \x00\xff"
    cells = [
        Cell(context, name, 1.5, 2.9, 10**9, 10**8, 11 * 10**8 if name == "plain" else None, 5.5)
        for context in settings.long_contexts
        for name in IMPLEMENTATIONS
    ]
    cells[-1] = Cell(4096, "plain", estimate_bytes=27 * 10**9, reason="needs 27.0 GB, not run")
    corpus = Corpus("some text", b"text" * 1000, "ab" * 32, 3)
    facts = {"machine": "a chip", "plan": "backend   cpu"}
    values: dict[str, Any] = {"arms": arms, "cells": cells, "status": COMPLETE, "seconds": 180.0}
    return Record(settings, corpus, facts, **{**values, **changes})


class _Reader(html.parser.HTMLParser):
    """Collects the text and the tags, and checks that what opens is closed in order."""

    VOID = frozenset({"meta", "br", "line", "circle", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.text += data


def _read(record: Record) -> _Reader:
    page = report.write(record)
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


def test_the_page_tells_the_numbers(tmp_path: Path) -> None:
    text = _read(_record(tmp_path)).text
    for said in (
        "steps 2.5x faster",
        "200 ms",
        "80 ms",
        "600 MB",
        "240 MB",
        "10,240",
        "25,600",
        "needs 27.0 GB, not run",
        "def f(x):",
        "2.610000",
        "writes the same text",
    ):
        assert said in text, said


def test_the_page_loads_nothing_and_is_escaped(tmp_path: Path) -> None:
    record = _record(tmp_path)
    record.arm("tilewise").sample = EVIL
    record.arm("plain").sample = EVIL
    record.arm("plain").warnings = EVIL
    record.corpus = record.corpus._replace(name=EVIL)
    record.environment = {"machine": EVIL}
    record.status = EVIL
    record.cells[-1] = Cell(4096, "plain", reason=EVIL)
    reader = _read(record)
    assert "script" not in reader.tags
    assert reader.text.count(EVIL) == 7  # name and text, status, sample, machine, warning, reason
    assert set(reader.links) == {"report.json"}
    assert not re.search(r"https?:|url\(|@import", (tmp_path / "report.html").read_text())


def test_bytes_that_do_not_print_are_marked(tmp_path: Path) -> None:
    raw = (_read(_record(tmp_path)).text).split("def f(x):")[1]
    assert "\x00" not in raw
    assert "\N{SYMBOL FOR SUBSTITUTE}\N{REPLACEMENT CHARACTER}" in raw


def test_the_json_holds_every_step(tmp_path: Path) -> None:
    record = _record(tmp_path)
    report.write(record)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["status"] == "complete"
    assert [len(arm["losses"]) for arm in found["arms"]] == [30] * 4
    assert [len(arm["wall_s"]) for arm in found["arms"]] == [30] * 4
    assert found["corpus"] == {"name": "some text", "bytes": 4000, "files": 3, "sha256": "ab" * 32}
    assert Settings.from_json(found["settings"]) == record.settings
    assert len(found["long_context"]) == 6
    assert found["checks"][0]["passed"] is True


def _empty(arm: Arm, steps: int) -> None:
    for values in (arm.losses, arm.wall_s, arm.cpu_s):
        del values[steps:]
    arm.held_out = arm.saved_bytes = arm.sample = None


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_partial_run_gives_a_report(tmp_path: Path, steps: int) -> None:
    record = _record(tmp_path, status="stopped with Ctrl-C")
    for index, arm in enumerate(record.arms):
        _empty(arm, max(steps - index % 2, 0))
    record.cells = record.cells[:2]
    reader = _read(record)
    assert "Stopped early" in reader.text
    assert "stopped with Ctrl-C" in reader.text
    assert "What the model writes" not in reader.text
    assert "not reached" in reader.text
    assert "Ended early" in report.summary(record)


def test_disagreement_is_the_headline(tmp_path: Path) -> None:
    record = _record(tmp_path)
    record.arm("tilewise").losses[3] *= 1.001
    assert "The losses do not agree" in _read(record).text
    assert "FAIL First 20 steps" in report.summary(record)


def test_slower_and_larger_is_said_too(tmp_path: Path) -> None:
    record = _record(tmp_path)
    tilewise = record.arm("tilewise")
    tilewise.wall_s, tilewise.peak_bytes = [0.5] * 30, 9 * 10**8
    text = _read(record).text
    assert "steps 2.5x slower" in text
    assert "2.5x more" in text
    assert "1.5x more" in text


def test_words() -> None:
    assert [words.seconds(s) for s in (0.0123, 0.5, 0.9999, 12.34, 120)] == [
        "12.3 ms",
        "500 ms",
        "1.0 s",
        "12.3 s",
        "120 s",
    ]
    assert [words.size(s) for s in (5e6, 999.7e6, 2.64e10)] == ["5 MB", "1.0 GB", "26.4 GB"]
    assert [words.times(r) for r in (1.004, 2.44, 12.2)] == ["1.00x", "2.4x", "12x"]
    assert words.saving(3.0, 6.0) == "2.0x more"
    assert words.typeset("within 1e-05, or 0x1e5") == "within 10⁻⁵, or 0x1e5"
    assert words.typeset("1.2e-07") == "1.2\N{MULTIPLICATION SIGN}10⁻⁷"
    assert [words.power_of_ten(n) for n in (-8, -1, 2)] == ["10⁻⁸", "0.1", "100"]


def test_axes_have_round_ticks_and_cover_the_values() -> None:
    axis = linear("x", [2.31, 5.47])
    assert axis.low <= 2.31
    assert axis.high >= 5.47
    assert [label for _, label in axis.ticks] == ["2", "3", "4", "5", "6"]
    assert axis.place(axis.low) == 0.0
    assert axis.place(axis.high) == 1.0
    assert linear("x", [3.0]).low < 3.0 < linear("x", [3.0]).high
    log = decades("y", -8, -4)
    assert log.place(1e-6) == pytest.approx(0.5)
    assert log.place(0.0) == 0.0  # below the axis: on its edge


def test_a_chart_stays_in_its_frame() -> None:
    x, y = Axis("x", 1.0, 2.0, ((1.0, "1"),)), decades("y & z", -2, 0)
    svg = draw(x, y, [Line("a<b", [(1.0, 1e-9), (9.0, 5.0)], "plain", dots=2.0)], "all & sundry")
    numbers = [float(n) for n in re.findall(r'c[xy]="([-\d.]+)"', svg)]
    assert len(numbers) == 4
    assert all(0 <= n <= 480 for n in numbers)
    assert "a&lt;b" in svg
    assert 'aria-label="all &amp; sundry"' in svg
    assert "y &amp; z" in svg
