"""The demo as a user runs it: a whole quick run, Ctrl-C, and what goes wrong."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tilewise
from tilewise.lab.demo import contest
from tilewise.lab.demo.child import Child, ChildError
from tilewise.lab.demo.contest import DivergenceError, line_up
from tilewise.lab.demo.main import main
from tilewise.lab.demo.progress import Progress
from tilewise.lab.demo.settings import QUICK, Settings, parse
from tilewise.lab.demo.worker import Job

COMMAND = [sys.executable, "-m", "tilewise.lab.demo.main", "--quick", "--threads", "1"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}


def test_a_whole_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "report"
    ran = subprocess.run(
        [*COMMAND, "--out", str(out)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Expected time" in ran.stdout
    assert ran.stdout.index("Expected time") < ran.stdout.index("step ")
    assert str(out / "report.html") in ran.stdout
    found = json.loads((out / "report.json").read_text())
    assert found["status"] == "complete"
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert [len(arm["losses"]) for arm in arms.values()] == [QUICK.steps] * 4
    assert all(check["passed"] for check in found["checks"])
    # So short a run may hide a nudge of one ulp from some arms' losses, but not from all of them.
    assert len({tuple(arm["losses"]) for arm in arms.values()}) > 1
    assert len({arm["nudge_seed"] for arm in arms.values()}) == 3
    assert arms["tilewise"]["losses"][-1] < arms["tilewise"]["losses"][0] - 0.3
    assert len(arms["tilewise"]["sample"]) == len("def ") + QUICK.sample_bytes
    for arm in arms.values():
        assert 10**5 < arm["peak_bytes"] < 10**8
        assert all(0 < wall < 60 for wall in arm["wall_s"])
    cells = {cell["implementation"]: cell for cell in found["long_context"]}
    assert cells["plain"]["saved_bytes"] > cells["tilewise"]["saved_bytes"] > 0
    assert cells["plain"]["loss"] == pytest.approx(cells["tilewise"]["loss"], rel=1e-5)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_leaves_a_usable_report_and_no_process(tmp_path: Path) -> None:
    out = tmp_path / "report"
    process = subprocess.Popen(
        [*COMMAND, "--steps", "100000", "--out", str(out)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        for line in process.stdout:
            if line.startswith("step "):
                break
        children = _children(process.pid)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 130, rest
    assert "stopped with Ctrl-C" in rest
    assert "Traceback" not in rest
    found = json.loads((out / "report.json").read_text())
    assert found["status"] == "stopped with Ctrl-C"
    assert len(found["arms"][0]["losses"]) >= 1
    assert "Stopped early" in (out / "report.html").read_text()
    deadline = time.monotonic() + 10
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(child) for child in children)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "{missing}"], "--text.*No such file"),
        (["--text", "{folder}"], "--text.*folder"),
        (["--text", "{empty}"], "--text.*empty"),
        (["--text", "{short}"], "--text.*at least.*--context"),
        (["--out", "{short}"], "--out"),
        (["--steps", "0"], "--steps: got 0"),
        (["--width", "30", "--heads", "4"], "--width: got 30.*8"),
        (["--long", "5"], "--long: got 5.*16 or more"),
        (["--threads", "0"], "--threads: got 0"),
    ],
)
def test_a_wrong_request_ends_with_code_2(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    names = {name: str(tmp_path / name) for name in ("missing", "empty", "short")}
    given = [option.format(folder=tmp_path, **names) for option in options]
    assert main(["--out", str(tmp_path / "out"), "--quick", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tilewise demo: ")
    assert re.search(message, error), error


def test_an_unknown_option_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--stepz", "3"])
    assert ended.value.code == 2
    assert "--stepz" in capsys.readouterr().err


def test_options_win_over_quick() -> None:
    settings = parse(["--quick", "--steps", "7", "--seed", "3", "--threads", "1"])
    assert (settings.steps, settings.seed, settings.threads) == (7, 3, 1)
    assert settings.width == QUICK.width
    assert parse(["--long"]).long_contexts == ()
    assert parse(["--long", "900", "300"]).long_contexts == (300, 900)
    assert parse([]).context >= 1024
    assert max(parse([]).long_contexts) >= 8192


def test_the_last_words_of_a_failed_child_are_told(tmp_path: Path) -> None:
    job = Job(QUICK.as_json(), str(tmp_path / "no corpus"), "plain", None)
    with Child(job, "the plain arm") as child, pytest.raises(ChildError) as caught:
        child.hear()
    assert "the plain arm ended with code 1" in str(caught.value)
    assert "FileNotFoundError" in str(caught.value)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _follow(stream: io.StringIO) -> str:
    arms = line_up(Settings(steps=40))
    progress = Progress(arms, 40, stream)
    for step in range(1, 41):
        for arm in arms:
            arm.losses.append(5.0 / step)
            arm.wall_s.append(0.5)
            progress.turn(arm.name, step, arm.losses[-1], 0.5)
    progress.end()
    return stream.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_a_few_lines_elsewhere() -> None:
    lines = _follow(io.StringIO()).splitlines()
    assert 8 <= len(lines) <= 14
    assert "step    1/40  1:18 left  plain 5.000000  tilewise 5.000000" in lines[0]
    assert lines[-1].startswith("step   40/40  0:00 left")
    bars = _follow(Terminal()).rstrip().split("\r")[1:]
    assert len(bars) == 160
    assert bars[-1].startswith("[########################] 100% 0:00 left control-2 40/40")
    assert all(len(bar.removesuffix("\x1b[K")) < 80 for bar in bars)


class NanChild:
    """A worker whose second turn is not a number."""

    def __init__(self, job: object, title: str) -> None:
        self.turns = 0

    def __enter__(self) -> NanChild:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def hear(self) -> None:
        pass

    def warnings(self) -> str:
        return ""

    def ask(self, count: int, **_: object) -> dict[str, Any]:
        self.turns += 1
        losses = [3.0] * count if self.turns == 1 else [3.0, *[float("nan")] * (count - 1)]
        return {"losses": losses, "wall_s": [0.1] * count, "cpu_s": [0.1] * count, "peak_bytes": 1}


class Silent:
    def turn(self, arm: str, step: int, loss: float, step_s: float) -> None:
        pass


def test_a_loss_that_is_no_number_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "Child", NanChild)
    settings = Settings(steps=20)
    with pytest.raises(DivergenceError, match="plain: the loss is nan at step 3"):
        contest.run(settings, line_up(settings), "text", Silent())
