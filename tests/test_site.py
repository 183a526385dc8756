"""The docs site builds without a warning, has every public name, and loads nothing remote.

``./run docs --check`` runs this. It needs the extra ``docs``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tilewise
from tests.chromium import Visits, browser, visit
from tests.test_floors import PUBLIC
from tilewise.compat import _PACKAGES

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
# Modules that are public, and whose names users find on the pages of others.
ELSEWHERE = {
    "tilewise.commands": "what commands print, for commands of other packages",
    "tilewise.inspect.answer": "`tilewise explain`",
    "tilewise.inspect.known_models": "`tilewise explain`",
    "tilewise.variants.values": "tilewise.masks.Mask and tilewise.scores.Score",
}
# Modules that extend classes of libraries which ./run does not install.
ABSENT = {
    "tilelab.huggingface": "lab/src/tilelab/huggingface.py",
    "tilewise.integrations.vllm": "src/tilewise/integrations/vllm.py",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of pages, built anew."""
    for package in ("furo", "myst_parser"):
        pytest.importorskip(package, reason="needs the extra docs: ./run docs --check")
    shutil.rmtree(ROOT / "docs/api", ignore_errors=True)  # pages of modules that were
    command = f"{sys.executable} -W ignore -m sphinx -q -E -a -W -c docs -d build/doctrees . {SITE}"
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return SITE


def modules() -> list[str]:
    """The modules of the reference."""
    return re.findall(r"^   (tile[\w.]+)$", (ROOT / "docs/api.md").read_text(), re.M)


def module(name: str) -> ModuleType:
    """The module that users write as ``name``."""
    parent, _, last = name.rpartition(".")
    if parent == "tilewise" and isinstance(getattr(tilewise, last, None), ModuleType):
        found: ModuleType = getattr(tilewise, last)
        return found
    return importlib.import_module(name)


def public_names(name: str) -> list[str]:
    """The names that a module of the reference has for users."""
    if name not in ABSENT:
        return list(getattr(module(name), "__all__", ()))
    stated = re.search(r"^__all__ = (\[.*?\])$", (ROOT / ABSENT[name]).read_text(), re.M | re.S)
    return ast.literal_eval(stated[1]) if stated else []


def test_every_public_module_is_in_the_reference() -> None:
    listed = {name if name in ABSENT else module(name).__name__ for name in modules()}
    wanted = {name for name in PUBLIC if not name.endswith(".*")}
    for package in ("tilewise.inspect", "tilewise.plan.traffic"):
        assert f"{package}.*" in PUBLIC
    wanted |= {"tilewise.plan.traffic"}
    wanted |= {f"tilewise.inspect.{path.stem}" for path in _files("inspect")}
    # The doors: packages, and modules of a package that its tables call by their names.
    wanted |= {f"tilewise.integrations.{path.name}" for path in _folders("integrations")}
    wanted |= {f"tilewise.integrations.{path.stem}" for path in _files("integrations")}
    wanted |= {each for one in _PACKAGES.values() for each in one.modules.values() if each}
    compatible = (ROOT / "docs/compatibility.md").read_text()
    wanted |= set(re.findall(r"^## `(tilewise\.[\w.]+)`$", compatible, re.M))
    assert sorted(wanted - listed - ELSEWHERE.keys()) == []


def _files(room: str) -> list[Path]:
    return [path for path in (ROOT / "src/tilewise" / room).glob("*.py") if path.stem[0] != "_"]


def _folders(room: str) -> list[Path]:
    return [path.parent for path in (ROOT / "src/tilewise" / room).glob("*/__init__.py")]


def test_every_public_name_is_on_the_site(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    kinds = (names for kind, names in inventory.data.items() if kind.startswith("py:"))
    objects = {name for names in kinds for name in names}
    names = 0
    for name in modules():
        assert name in objects, name
        public = public_names(name)
        missing = {f"{name}.{each}" for each in public} - objects
        assert missing == set()
        names += len(public)
    assert names > 200
    assert "tilewise.integrations.vllm.register" in objects


class Loads(HTMLParser):
    """Collects what a browser fetches for a page, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort an element's addresses."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links.append(given.get("href", ""))
        elif tag != "link" or given.get("rel") not in (
            "canonical",
            "index",
            "next",
            "prev",
            "search",
        ):
            self.fetched += [
                given[name] for name in ("src", "href", "srcset", "data") if name in given
            ]


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Loads]:
    """Every page, read."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        found[path] = Loads()
        found[path].feed(path.read_text())
    assert len(found) > 60
    return found


def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[Path, Loads]) -> None:
    assert any(page.fetched for page in pages.values())
    remote = re.compile(r"(?:https?:)?//")
    assert {
        address for page in pages.values() for address in page.fetched if remote.match(address)
    } == set()
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet
    for script in site.rglob("*.js"):
        called = r"(?:fetch|import|importScripts|open)\(\s*[\"'`](?:https?:)?//"
        loaded = r"\.src\s*=\s*[\"'`](?:https?:)?//"
        assert not re.findall(f"{called}|{loaded}", script.read_text()), script
    for picture in site.rglob("*.svg"):
        assert not re.findall(r"href=\"(?:https?:)?//|url\(\s*[\"']?https?:", picture.read_text())


def test_every_link_within_the_site_leads_somewhere(pages: dict[Path, Loads]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"\w+:|//", link):
                continue
            address, _, place = link.partition("#")
            target = (path.parent / address).resolve() if address else path
            if not target.exists() or (
                place and target in pages and place not in pages[target].ids
            ):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_the_start_page_and_the_search(site: Path, pages: dict[Path, Loads]) -> None:
    assert "docs/index.html" in (site / "index.html").read_text()
    start = (site / "docs/index.html").read_text()
    assert "speed.svg" in start
    assert "Exact attention that never writes the N x N matrix" in start
    index = (site / "searchindex.js").read_text()  # a script, not fetched: search works offline
    assert all(f'"{word}"' in index or f"{word}:" in index for word in ("logsumexp", "butterfli"))
    # Every page of docs/ is in the navigation.
    named = {link.partition("#")[0] for link in pages[site / "docs/index.html"].links}
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or f"{page.stem}.html" in named, page.name


@pytest.mark.parametrize("missing", ["tilewise", "tilelab", ""])
def test_the_notebook_installs_what_is_missing(missing: str, monkeypatch: Any) -> None:
    """It asks pip for the clone and its lab. Here pip is a function that writes down its words."""
    manager = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    cell = json.loads((ROOT / "docs/tour.ipynb").read_text())["cells"][0]
    asked: list[tuple[str, str]] = []
    shell = SimpleNamespace(run_line_magic=lambda name, line: asked.append((name, line)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != missing or None)
    exec(manager.transform_cell("".join(cell["source"])), {"get_ipython": lambda: shell})
    pip = ("pip", "install --quiet {CLONE} {CLONE}/lab")  # IPython puts CLONE in
    assert asked == ([pip] if missing else [])


# What a browser sees that nothing should have: text that is cut, text that runs out of its cell or
# heading, what sticks out of the page, pictures that did not load, addresses of other hosts.
FAULTS = ("cut", "spilt", "wide", "broken", "remote", "error")
PHONE, DESK = 400, 1280


def faults(visits: Visits) -> dict[str, dict[str, object]]:
    """What is wrong with each page at each width."""
    found = {}
    for seen in visits.seen:
        wrong = {name: seen[name] for name in FAULTS if seen.get(name)}
        if seen.get("scroll", 0) > seen["width"]:
            wrong["scroll"] = seen["scroll"]
        if not (seen.get("words") or seen["address"].endswith(".svg")):
            wrong["empty"] = True
        if wrong:
            found[f"{seen['address']} at {seen['width']}"] = wrong
    return found


def test_every_page_is_whole_on_a_phone_and_on_a_desk(site: Path, tmp_path: Path) -> None:
    """In a real browser: nothing scrolls sideways but boxes of their own, and nothing is cut."""
    browser()
    pages = [*site.rglob("*.html"), *site.rglob("_images/*.svg")]
    pages.remove(site / "index.html")  # leads to the start page
    names = sorted(str(page.relative_to(site)) for page in pages)
    visits = visit(site, names, (PHONE, DESK), tmp_path / "profile", 400)
    assert len(visits.seen) == 2 * len(names)
    assert faults(visits) == {}
    assert visits.missing == []
    assert visits.console == []


def test_a_page_that_is_not_whole_would_be_noticed(tmp_path: Path) -> None:
    browser()
    bad = {
        "wide": "<div style='overflow: auto'><div style='width: 900px'>far</div></div>",
        "scroll": "<pre>" + "far " * 90 + "</pre>",
        "cut": "<p style='overflow: hidden; white-space: nowrap'>" + "cut " * 90 + "</p>",
        "spilt": "<div style='overflow: auto'><table style='table-layout: fixed; width: 200px'>"
        "<tr><td>" + "long" * 30 + "<td>beside</table></div>",
        "broken": "here <img src='absent.png'>",
        "remote": "here <img src='https://elsewhere.invalid/far.png'>",
        "empty": "",
    }
    good = "<script>missing()</script><pre style='overflow: auto'>" + "far " * 90 + "</pre>"
    head = '<!doctype html><meta charset="utf-8"><title>page</title><body>'
    for name, body in (bad | {"good": good}).items():
        (tmp_path / f"{name}.html").write_text(head + body)
    box = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 99 20"><text x="{}" y="15">a word'
    for name, place in (("out", 90), ("in", 9)):
        (tmp_path / f"{name}.svg").write_text(box.format(place) + "</text></svg>")
    names = [path.name for path in tmp_path.iterdir()]
    visits = visit(tmp_path, names, (PHONE,), tmp_path / "profile", 60)
    found = faults(visits)
    assert {name for name in bad if name not in found.pop(f"/{name}.html at 400", {})} == set()
    assert found.pop("/out.svg at 400")["cut"] == ["text: a word"]
    assert found == {}
    assert [each.split()[0] for each in visits.missing] == ["/absent.png"]
    assert [line for line in visits.console if "missing is not defined" in line]


def test_the_notebook_runs(tmp_path: Path) -> None:
    """As a reader would: all cells in turn in a kernel of its own, away from the source."""
    nbclient = pytest.importorskip("nbclient", reason="needs the extra docs: ./run docs --check")
    nbformat = pytest.importorskip("nbformat", reason="comes with nbclient")
    notebook = nbformat.read(ROOT / "docs/tour.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()  # raises the error of a cell
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[0].metadata.tags == ["install"]
    assert cells[0].outputs == []  # nothing is missing here, so it installs nothing
    said = "".join(out.get("text", "") for cell in cells for out in cell.outputs)
    assert "True\n" in said
    assert "1 of 1 calls taken" in said
