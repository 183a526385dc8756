"""A real browser, without a window, for tests that look at pages."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
)


def browser() -> str:
    """Where chromium is; skips the test where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium: install it to see whether the page is drawn")
    return found


# Loads page after page in a frame of the wished width (a window cannot be as narrow as a phone) and
# sends what it saw.
VISITOR = """<!doctype html><title>visitor</title><link rel="icon" href="data:,">
<body style="margin: 0"><script>
const name = (element) => element.tagName.toLowerCase()
  + (element.id ? "#" + element.id : "") + [...element.classList].map((each) => "." + each).join("")
  + ": " + (element.textContent || element.getAttribute("src") || "").trim().slice(0, 50);
const next = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
const event = (target) => new Promise((done) => { target.onload = target.onerror = done; });

async function visit(address, width) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  const loaded = event(frame);
  frame.src = address;
  document.body.replaceChildren(frame);
  await Promise.race([loaded, next(30)]);
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
  await page.fonts.ready;
  return page.contentType === "image/svg+xml" ? picture(page, root) : text(page, view, root);
}

// The words of a picture that do not lie within it.
function picture(page, root) {
  const box = root.viewBox.baseVal, matrix = root.getScreenCTM();
  const left = matrix.e + matrix.a * box.x, top = matrix.f + matrix.d * box.y;
  const right = left + matrix.a * box.width, bottom = top + matrix.d * box.height;
  const words = [...page.querySelectorAll("text, g[id^=text_]")]; // the latter: drawn letters
  const cut = words.filter((each) => {
    const { left: l, right: r, top: t, bottom: b } = each.getBoundingClientRect();
    return l < left - 1 || r > right + 1 || t < top - 2 || b > bottom + 2;
  });
  return { cut: cut.map(name), words: words.length };
}

async function text(page, view, root) {
  const images = [...page.images];
  for (const each of images) {
    const came = event(each);
    each.loading = "eager";
    if (!each.complete) await Promise.race([came, next(10)]);
  }
  const style = (each) => view.getComputedStyle(each);
  const scrolls = (each) => /auto|scroll/.test(style(each).overflowX);
  const clips = (each) => /hidden|clip/.test(style(each).overflowX + style(each).overflowY);
  const within = (each) => { // what bounds the sight of an element: a box of its own, or the page
    for (let box = each; box && box !== root; box = box.parentElement)
      if (scrolls(box) || style(box).position === "fixed") return box;
    return null;
  };
  const shown = (each) => each.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const cut = [], spilt = [], wide = [];
  for (const each of page.body.querySelectorAll("*")) {
    // What is for screen readers alone is a pixel large.
    if (each.closest("svg, script, style") || each.clientWidth < 2 || !shown(each)) continue;
    const over = each.scrollWidth - each.clientWidth;
    const below = each.scrollHeight - each.clientHeight;
    if (clips(each) && (over > 1 || below > 1)) cut.push(name(each));
    // Code and tables scroll in boxes of their own. A box around the whole text must not.
    const own = each.matches("pre, div.table-wrapper");
    if (scrolls(each) && over > 1 && !own) wide.push(name(each));
    const block = each.matches("td, th, p, dt, h1, h2, h3, h4, figcaption, a");
    if (block && over > 1 && style(each).overflowX === "visible") spilt.push(name(each));
    const { left, right } = each.getBoundingClientRect();
    if (within(each) === null) {
      if (left < -1) cut.push(name(each));
      if (right > view.innerWidth + 1) wide.push(name(each));
    }
  }
  return { cut, spilt, wide, width: view.innerWidth, scroll: root.scrollWidth,
    words: page.body.innerText.length,
    broken: images.filter((each) => !each.naturalWidth).map((each) => each.src),
    remote: view.performance.getEntriesByType("resource").map((each) => each.name)
      .filter((each) => !each.startsWith(location.origin) && !each.startsWith("data:")) };
}

(async () => {
  for (const [address, width] of await (await fetch("/visits.json")).json()) {
    const seen = await visit(address, width).catch((error) => ({ error: String(error) }));
    await fetch("/seen", { method: "POST", body: JSON.stringify({ address, width, ...seen }) });
  }
  await fetch("/seen", { method: "POST", body: "null" });
})();
</script>"""


@dataclass
class Visits:
    """What the browser saw, and which addresses it asked for in vain."""

    wanted: list[tuple[str, int]]
    seen: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


class _Site(http.server.SimpleHTTPRequestHandler):
    """The files of a folder, and the page that visits them."""

    visits: Visits

    def __init__(self, *given: Any, visits: Visits, **named: Any) -> None:
        self.visits = visits
        super().__init__(*given, **named)

    def do_GET(self) -> None:
        special = {"/visitor": VISITOR, "/visits.json": json.dumps(self.visits.wanted)}
        if self.path not in special:
            super().do_GET()
            return
        body = special[self.path].encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        seen = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if seen is None:
            self.visits.done.set()
        else:
            self.visits.seen.append(seen)
        self.send_response(204)
        self.end_headers()

    def send_error(self, code: int, *given: Any, **named: Any) -> None:
        self.visits.missing.append(f"{self.path} (for {self.headers.get('Referer', 'none')})")
        super().send_error(code, *given, **named)

    def log_message(self, *given: object) -> None:
        """Say nothing."""


def visit(
    folder: Path, addresses: Iterable[str], widths: Iterable[int], profile: Path, seconds: float
) -> Visits:
    """Look at each page and each SVG picture of the folder, at each width, with one browser."""
    program = browser()
    visits = Visits([(f"/{each}", width) for width in widths for each in addresses])
    handler = functools.partial(_Site, directory=str(folder), visits=visits)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/visitor"
        options = ("--remote-debugging-port=0", "--window-size=1400,1000")  # the port: stay
        command = [program, *OPTIONS, *options, f"--user-data-dir={profile}", home]
        said = profile.with_suffix(".log")
        with said.open("w") as log, subprocess.Popen(command, stderr=log) as running:
            finished = visits.done.wait(seconds)
            running.terminate()
        server.shutdown()
    visits.console = re.findall(r"CONSOLE.*", said.read_text(errors="replace"))
    assert finished, f"{len(visits.seen)} of {len(visits.wanted)} pages in {seconds} s"
    return visits
