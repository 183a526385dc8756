"""The page in a real browser: no error, every figure drawn, light and dark, and on a phone."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import chromium
from tests.lab.study.records_of import folder_of, known
from tests.lab.study.report.samples import rich_study
from tilelab.study.report import gather, write

DARK = "--blink-settings=preferredColorScheme=0"
PHONE, DESK = 380, 1280

# The page itself has no script. This one is added to a copy, which lies in a frame of the wished
# width (a window cannot be as narrow as a phone), and tells the frame's page what it saw.
PROBE = """<script>
for (const each of document.querySelectorAll("details")) each.open = true;
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const rect = (element) => element.getBoundingClientRect();
const figures = all("figure").map((figure) => {
  const svg = figure.querySelector("svg"), frame = rect(figure);
  const shapes = all("path, use", svg).filter((each) => rect(each).width + rect(each).height > 0);
  const styles = shapes.map((each) => getComputedStyle(each));
  const texts = all("text", svg).map((each) => ({
    text: each.textContent, left: rect(each).left - frame.left,
    right: frame.right - rect(each).right, height: rect(each).height }));
  return { title: figure.querySelector("h3").textContent, width: rect(svg).width,
    height: rect(svg).height, shapes: shapes.length, texts,
    colours: [...new Set(styles.flatMap((each) => [each.stroke, each.fill]))] };
});
const body = getComputedStyle(document.body);
parent.postMessage(JSON.stringify({ figures, paper: body.backgroundColor, ink: body.color,
  forests: all("svg.forest").map((each) => [rect(each).width, rect(each).height]),
  rows: all(".verdicts .arm").map((each) => rect(each).width),
  spill: all(".verdicts .arm").flatMap((row) => all("th *, td *", row)
    .filter((each) => !each.closest("svg") && (rect(each).right > rect(row).right
      || (each.matches(".chip") && each.scrollWidth > each.clientWidth)))
    .map((each) => each.textContent)),
  width: innerWidth, scroll: document.documentElement.scrollWidth }), "*");
</script></body>"""
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><title>nothing seen</title>
<script>addEventListener("message", (event) => { document.title = event.data; });</script>
<iframe src="probed.html" style="border: 0; width: {width}px; height: 900px"></iframe>"""


@pytest.fixture(scope="module")
def browser() -> str:
    return chromium.browser()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study, records = rich_study()
    return write(gather(folder_of(tmp_path_factory.mktemp("browser"), study, records)))[0]


def _run(browser: str, page: Path, *options: str) -> tuple[str, list[str]]:
    """The DOM, and what the page said on the console."""
    profile = page.parent / "profile"
    done = subprocess.run(
        [
            browser,
            *chromium.OPTIONS,
            f"--user-data-dir={profile}",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def _seen(browser: str, page: Path, width: int, *options: str) -> dict[str, Any]:
    """What the probe sees in a window of that width."""
    page.with_name("probed.html").write_text(
        page.read_text("utf-8").replace("</body>", PROBE), "utf-8"
    )
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.replace("{width}", str(width)), "utf-8")
    wait = "--virtual-time-budget=5000"
    dom, console = _run(browser, frame, "--dump-dom", wait, "--window-size=1400,1000", *options)
    assert console == []
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    found: dict[str, Any] = json.loads(html.unescape(known(title).group(1)))
    assert found["width"] == width
    return found


def test_an_error_would_be_noticed(browser: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<title>x</title><script>console.error('seen'); missing()</script>")
    _, console = _run(browser, bad, "--dump-dom")
    assert any("seen" in line for line in console)
    assert any("missing is not defined" in line for line in console)


@pytest.mark.parametrize(("width", "options"), [(DESK, ()), (PHONE, (DARK,))])
def test_every_figure_is_drawn(
    browser: str, page: Path, width: int, options: tuple[str, ...]
) -> None:
    seen = _seen(browser, page, width, *options)
    assert len(seen["figures"]) == 21
    for figure in seen["figures"]:
        assert figure["width"] > 300, figure["title"]
        assert figure["height"] > 60, figure["title"]
        assert figure["shapes"] > 8, figure["title"]
        # Colours are the page's: a variable that is not there would leave all in black.
        assert len(set(figure["colours"]) - {"none", "rgb(0, 0, 0)"}) > 2, figure["title"]
        for text in figure["texts"]:
            assert text["left"] >= 0, (figure["title"], text)
            assert text["right"] >= 0, (figure["title"], text)
            assert text["height"] >= 11, (figure["title"], text)  # large enough to read
    assert len(seen["forests"]) == 9
    assert all(wide > 150 and high == 38 for wide, high in seen["forests"])
    # Nothing hangs out of the page; wide tables scroll in a frame of their own.
    assert seen["scroll"] <= width
    assert all(row <= width for row in seen["rows"])
    assert seen["spill"] == []
    paper, ink = (
        [int(number) for number in re.findall(r"\d+", seen[name])[:3]] for name in ("paper", "ink")
    )
    assert (sum(paper) < sum(ink)) == (DARK in options)
