"""Somebody's own training as a study: commands and functions, what they report, and resuming."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.lab.study.in_process import quickly, records, run, verdicts
from tests.lab.study.records_of import known as known_value
from tilelab.study.ask.config import RunConfig, Task, change
from tilelab.study.ask.run import RunSpec
from tilelab.study.ask.values import config_hash, hash_of
from tilelab.study.conduct import command, progress, script
from tilelab.study.recipes.own import own_study
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.measures import measure
from tilewise import cli
from tilewise.errors import InvalidArgument, TilewiseError

# Without torch, so that a run takes a moment. The seed moves all arms alike.
TRAIN = """
import json, math, random, sys, time
from pathlib import Path

given = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
folder = Path(given["folder"])
folder.mkdir(exist_ok=True, parents=True)
state = folder / "step"
first = int(state.read_text()) if state.exists() else 0
shift = random.Random(int(given["seed"])).gauss(0, 1)
best = abs(math.log10(float(given["lr"]) / 0.01))
for step in range(first + 1, 5):
    busy = time.process_time() + 0.025
    while time.process_time() < busy:  # for more than a tick, in which processor time is counted
        pass
    lost = given["wild"] == "True" and step == 3
    held_out = math.nan if lost else shift + best - 0.5 * (given["trick"] == "on") + 1 / step
    print(f"step {step} of 4 is no line of JSON")
    print(json.dumps({"step": step, "loss": held_out, "tokens": 10 * step}), flush=True)
    if step % 2 == 0:
        print(json.dumps({"step": step, "val": held_out}), flush=True)
    state.write_text(str(step))
    if given.get("die") == str(step) and not first:
        sys.exit("the disk is on fire")
"""
STUDY = """
from pathlib import Path
from tilelab.study.recipes.own import own_study

FILE = Path(__file__).with_name("train.py")
COMMAND = f"python {FILE} {{choices}} --seed={{seed}} --folder={{folder}}"

def study():
    return own_study(
        "own", COMMAND, metric="val", smallest_effect=0.05, seeds=3,
        baseline={"lr": 0.001, "trick": "off", "wild": False},
        arms={"trick": {"trick": "on"}, "wild": {"wild": True}},
        tune={"lr": (1, 10)},
    )

def train(seed, choices, folder, log):
    log({"a|val": 2.0, "loss": 1.5})
    for step in (1, 2):
        yield {"step": step, "a|val": seed + choices["shift"] / step, "note": "ignored"}

def functions():
    return own_study(
        "functions", train, metric="a|val", smallest_effect=0.05, higher_is_better=True, seeds=3,
        baseline={"shift": 0.0}, arms={"up": {"shift": 1.0}},
    )
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "my.py").write_text(STUDY)
    return tmp_path


def test_a_command_is_tuned_paired_and_judged(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = place / "studies"
    with quickly(place):
        status, started = run(str(place / "my.py"), out)
    assert status == 0
    (verdict,) = verdicts(out)
    arms = {each["arm"]: each for each in verdict["arms"]}
    assert arms["trick"]["label"] == "better"
    assert arms["trick"]["effect"] == pytest.approx(-0.5)
    assert arms["wild"]["label"] == "diverged"
    assert [each["chosen"] for each in verdict["sweeps"]] == [0.01, 0.01, None]
    known = records(out)
    assert len(started) == len(known) == 3 * 2 + 2 * 3, "an arm that diverged has trials alone"
    record = known["own/trick/seed-1"]
    assert [each.step for each in record.evaluations] == [2, 4]
    assert record.evaluations[-1].tokens == sum(each.tokens or 0 for each in record.steps) == 40
    # The first line has the start in it; one with the metric alone is the evaluation of its step.
    assert [each.step for each in record.steps if not each.warmup] == [2, 3, 4]
    assert sum(each.of for each in record.steps) == 4
    timed = [each for each in record.steps if not each.warmup]
    values = measure(record)
    assert values["tokens_per_s"] == pytest.approx(30 / sum(each.wall_s for each in timed))
    assert values["step_s"] == statistics.median(each.wall_s for each in timed)
    assert known_value(record.memory).peak_bytes > 1e6, "Python alone takes more"
    assert arms["trick"]["measures"]["memory_ratio"]["value"] == pytest.approx(1, abs=0.2)
    spent = arms["trick"]["cost"]
    assert (spent["runs"], spent["sweep_runs"]) == (5, 2)
    assert 0 < spent["sweep_cpu_s"] < spent["cpu_s"]
    assert spent["wall_s"] == pytest.approx(
        sum(each.wall_s for name, one in known.items() if "/trick/" in name for each in one.steps)
    )
    (page,) = (path.read_text() for path in out.glob("*/report.md"))
    assert "it is the script that draws weights and batches" in page
    assert "(choice.trick = on, choice.lr = 0.01 by its sweep)" in page
    assert "model.layers" not in page, "a script has no such setting"
    assert "#### Memory\n\n| arm | peak |" in page
    head = page.partition("#### Speed\n\n")[2].partition("\n")[0]
    if head != "| arm | tokens/s | tokens/CPU-s | step | first to ninth decile |":
        assert head == "| arm | tokens/CPU-s |"
        assert "other work on the machine moved the wall clock" in page
    (page,) = (path.read_text() for path in out.glob("*/report.html"))
    assert "come out the same is up to the script" in page
    assert "same to the bit" not in page
    with quickly(place):
        assert run(str(place / "my.py"), out) == (0, []), "nothing is run again"
    capsys.readouterr()
    assert cli.main(["study", "show", "own/trick", "--out", str(out)]) == 0
    assert cli.main(["study", "compare", "own/trick", "own/baseline", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"own/trick/seed-1 +done +4 +1\.0382", shown)
    assert "last bit" not in shown, "nobody knows the weights of a script"
    assert run(str(place / "my.py"), place / "several", options=("--processes", "2")) == (2, [])
    assert "--processes: got 2 processes; required: 1: a script" in capsys.readouterr().err


def test_a_dry_run_lists_the_runs_and_what_they_detect(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = ("--out", str(place / "studies"))
    asked = ["study", str(place / "my.py"), "--dry-run", *out]
    assert cli.main(asked) == 0
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if " trick " in line and "lr=" in line]
    assert re.search(r"lr=0.001 trick=on wild=False\W+2\W+3\W+1\W", row)
    assert "15 runs. Nothing is known of their time" in said
    assert re.search(r"3 seeds: .* needs \|t\| > \d", said)
    assert not (place / "studies").exists()
    assert cli.main([*asked, "--chip", "h200"]) == 2
    assert "--chip: got own, which runs a script" in capsys.readouterr().err


def test_a_function_yields_or_logs(place: Path) -> None:
    out = place / "studies"
    with quickly(place):
        status, _ = run(f"{place / 'my.py'}:functions", out)
    (verdict,) = verdicts(out)
    (page,) = (path.read_text() for path in out.glob("*/report.md"))
    assert r"effect, a\|val |" in page, "a metric's name is no border of a table"
    assert "tokens reported, or else steps: 12" in page
    (arm,) = verdict["arms"]
    assert (status, arm["label"], arm["effect"]) == (0, "better", 0.5)
    evaluations = records(out)["functions/up/seed-2"].evaluations
    values = [(each.step, each.metrics["higher:a|val"]) for each in evaluations]
    assert values == [(1, 3.0), (2, 2.5)], "a later line of the same step counts"
    record = records(out)["functions/up/seed-2"]
    assert [(each.of, each.warmup) for each in record.steps] == [
        *((1, True), (0, True), (1, False)),
        (0, True),  # from the last line to the end
    ]
    assert known_value(record.memory).weights_bytes is None


def spec(place: Path, command: str, **fields: Any) -> RunSpec:
    study = own_study(
        "own",
        command,
        **{"metric": "val", "smallest_effect": 1, "baseline": {}, "arms": {"a": {}}, **fields},
    )
    (experiment,) = study.experiments
    found = RunSpec("own", "baseline", 7, experiment.baseline)
    return found.executed(found.execution, folder=place, cache=place)


def test_a_run_that_died_goes_on_from_its_own_folder(place: Path) -> None:
    command = f"python {place / 'train.py'} {{choices}} --seed={{seed}} --folder={{folder}}"
    choices = {"lr": 0.01, "trick": "off", "wild": False, "die": 3}
    found = spec(place, command, baseline=choices, arms={"a": {"lr": 1}})
    with pytest.raises(script._Failed, match="ended with status 1"):
        script.work(found)
    before = RunRecord.read(found.record)
    assert not before.done
    assert [each.step for each in before.evaluations] == [2]
    script.work(found)
    after = RunRecord.read(found.record)
    assert after.done
    assert [each.from_step for each in after.starts] == [0, 3]
    assert [each.step for each in after.evaluations] == [2, 4]
    kept = sum(each.wall_s for each in before.steps)
    assert after.evaluations[-1].train_wall_s > kept, "what it cost before is charged too"
    # One that has nothing to go on from begins again.
    (found.record.parent / script.FILES / "step").unlink()
    found.record.write_text("".join(found.record.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(script._Failed):
        script.work(found)
    assert [each.from_step for each in RunRecord.read(found.record).starts] == [0, 0]


def test_lines_may_be_in_a_file(place: Path) -> None:
    code = (
        "import sys, json\nprint('{\"val\": 9}')\n"
        "with open(sys.argv[1] + '/log.jsonl', 'w') as file:\n"
        "    print(json.dumps({'val': float(sys.argv[2])}), file=file)\n"
    )
    (place / "log.py").write_text(code)
    found = spec(place, f"python {place / 'log.py'} {{folder}} {{seed}}", lines="log.jsonl")
    script.work(found)
    record = RunRecord.read(found.record)
    assert [each.metrics for each in record.evaluations] == [{"lower:val": 7.0}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "no line of it has 'val'; they had nothing: there was no line"),
        ("print('{\"loss\": 1}')", "no line of it has 'val'; they had loss"),
        ('print(\'{"val": "low"}\')', "has val 'low': it has to be a number"),
        ('print(\'{"step": 2}\\n{"step": 1}\')', "has step 1 after step 2"),
        ("print('{\"val\": null}')", "has val null: leave it out of a line without one; NaN is"),
        (
            'print(\'{"tokens": 9}\\n{"tokens": 8}\')',
            "has tokens 8 after tokens 9: tokens are whole",
        ),
        ("print('{\"tokens\": -1}')", "has tokens -1 after tokens 0"),
        ("print('{\"tokens\": 1.5}')", "has tokens 1.5 after tokens 0"),
    ],
)
def test_lines_that_say_nothing(place: Path, body: str, message: str) -> None:
    (place / "bad.py").write_text(body)
    with pytest.raises(TilewiseError, match=re.escape(message)):
        script.work(spec(place, f"python {place / 'bad.py'} {{seed}}"))


def evaluations(place: Path, body: str) -> list[tuple[int, list[float | None]]]:
    place.mkdir(exist_ok=True)
    (place / "script.py").write_text(f"import json, os, subprocess, sys, time\n{body}")
    found = spec(place, f"python {place / 'script.py'} {{seed}}")
    script.work(found)
    record = RunRecord.read(found.record)
    return [(each.step, list(each.metrics.values())) for each in record.evaluations]


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ('"\\r 9 %\\r" + json.dumps({"val": 1})', [(1, [1.0])]),  # after a bar on the same line
        ('json.dumps({"loss": None, "val": 1})', [(1, [1.0])]),
        ("'{\"a\": ' + '[' * 100_000 + '\\n{\"val\": 1}'", [(1, [1.0])]),
        ('\'{"lr": 1}\\n{"step": 0, "val": 1}\'', [(0, [1.0])]),  # after its own settings
        ("'{\"val\": 1' + '0' * 400 + '}'", [(1, [None])]),  # larger than any float: diverged
    ],
)
def test_lines_of_odd_scripts(
    place: Path, printed: str, expected: list[tuple[int, list[float | None]]]
) -> None:
    assert evaluations(place, f"print({printed})") == expected


DIVERGED = "print('{\"val\": NaN}', flush=True)"


def test_what_a_command_leaves_running_is_not_waited_for(place: Path) -> None:
    """A tracker's service, say, which keeps the standard output open."""
    begun = time.monotonic()
    body = "subprocess.Popen(['sleep', '30'])\nprint(json.dumps({'val': 1}))"
    assert evaluations(place, body) == [(1, [1.0])]
    assert time.monotonic() - begun < 15


HOLDS = "held = b'1' * {megabytes}_000_000\n"


def peak_bytes(place: Path, body: str) -> float:
    evaluations(place, body)
    record = RunRecord.read(spec(place, f"python {place / 'script.py'} {{seed}}").record)
    return known_value(record.memory).peak_bytes


@pytest.mark.parametrize("end", ["print(json.dumps({'val': 1}))", DIVERGED])
def test_memory_is_the_commands_own(tmp_path: Path, end: str) -> None:
    """Not that of this process, which started it and has torch in it."""
    held = [HOLDS.format(megabytes=each) for each in (10, 120)]
    other = [f"subprocess.run([sys.executable, '-c', {each!r}])\n" for each in held]
    for number, bodies in enumerate((held, other)):
        small, large = (
            peak_bytes(tmp_path / f"{number}-{index}", body + end)
            for index, body in enumerate(bodies)
        )
        assert 15e6 < small < 60e6
        assert large - small == pytest.approx(110e6, rel=0.1)


def test_a_command_that_hears_nothing_is_killed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_GRACE_S", 0.2)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    begun = time.monotonic()
    pid = place / "pid"
    body = f"{deaf}open({str(pid)!r}, 'w').write(str(os.getpid()))\n{DIVERGED}\ntime.sleep(60)"
    assert evaluations(place, body) == [(1, [None])]
    assert time.monotonic() - begun < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_command_ends_as_its_process_did(place: Path) -> None:
    with pytest.raises(script._Failed, match="was ended by signal 6"):
        evaluations(place, "os.abort()")
    with pytest.raises(script._Failed, match="ended with status 7"):
        evaluations(place, "sys.exit(7)")
    with pytest.raises(InvalidArgument, match=r"that can be started \(No such file"):
        script.work(spec(place, "nowhere/to-be-found {seed}"))
    with pytest.raises(script._Failed, match="was ended by signal 9"):
        evaluations(place, "os.kill(os.getppid(), 9)\ntime.sleep(60)")


@pytest.mark.parametrize(
    ("command", "fields", "message"),
    [
        ("x {lr}", {}, "task.command: got {lr}; required: one of folder, seed, steps"),
        ("x --lr 1", {}, "task.command: got 'x --lr 1'; required: {seed} in it"),
        ("x {seed} 'a", {}, "required: a command (No closing quotation)"),
        (
            "x {seed}",
            {"baseline": {"lr": 1}},
            "choice: got 'lr'; required: a choice that the command has",
        ),
        ("x {seed}", {"arms": {"a": {"lr": 1}}}, "arms: got 'lr'; required: choices of the base"),
        ("x {seed}", {"baseline": {"seed": 1}}, "choice: got 'seed'; required: a name of"),
        ("x {seed}", {"files": ["gone.txt"]}, "files: got gone.txt; required: a file"),
        ("x {seed}", {"tune": {"a": (1,), "b": (1,)}}, "tune: got a, b; required: one choice"),
        (
            "x {seed} {lr}",
            {"baseline": {"lr": 1}, "tune": {"rate": (1,)}},
            "tune: got 'rate'; required: a choice of the baseline: lr",
        ),
    ],
)
def test_what_is_refused_before_a_run(command: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        spec(Path(), command, **fields)


def test_a_script_has_its_own_settings_and_others_have_none() -> None:
    config = spec(Path(), "x {seed}").config
    with pytest.raises(InvalidArgument, match="optimizer: got a change; required: its default"):
        change(config, {"optimizer.lr": 0.5})
    with pytest.raises(InvalidArgument, match="choice: got lr; required: none: task language"):
        change(RunConfig(), {"choice": {"lr": 1}})
    with pytest.raises(InvalidArgument, match="task: got neither of the two"):
        change(RunConfig(), {"task": "script"})
    named = change(
        spec(Path(), "x {seed} {optimizer}", baseline={"optimizer": "sgd"}).config,
        {"choice.optimizer": "muon"},
    )
    assert named.choice == {"optimizer": "muon"}, "it may be called like a choice of ours"


def test_steps_that_a_script_was_not_told_are_not_said() -> None:
    values: dict[str, Any] = {"metric": "loss", "smallest_effect": 0.1, "arms": {}, "seeds": 3}
    for steps, said in ((1, "nothing; 3 seeds"), (7, "nothing; 3 seeds, 7 steps")):
        study = own_study("own", "x {seed} {steps}", baseline={}, steps=steps, **values)
        assert progress.opening(study, Path()).splitlines()[1].endswith(f"against {said}")


def test_arrays_are_no_number_and_no_arms_are_a_question(place: Path) -> None:
    found = spec(place, "x {seed}")
    book = script._Book(found, RunRecord.read(found.record), None)  # type: ignore[arg-type]
    with pytest.raises(script.ScriptError, match="has val array"):
        book._number({"val": np.zeros(2)}, "val")
    study = own_study("own", "x {seed}", metric="v", smallest_effect=1, baseline={}, arms={})
    assert study.question == "What does the baseline reach?"


def test_a_script_that_is_changed_while_its_study_runs_is_refused(place: Path) -> None:
    """Else pairs would be of two scripts, and nothing would say so."""
    choices = {"lr": 0.01, "trick": "off", "wild": False}
    command = f"python {place / 'train.py'} {{choices}} --seed={{seed}} --folder={{folder}}"
    (place / "model.py").write_text("width = 1\n")
    more = {"baseline": choices, "arms": {"a": {"lr": 1}}, "files": [place / "model.py"]}
    found = spec(place, command, **more)
    (place / "model.py").write_text("width = 2\n")
    with pytest.raises(InvalidArgument, match=r"model.py, .*train.py, changed since; required: "):
        script.work(found)
    assert not RunRecord.read(found.record).done
    older = Task(**{**found.config.task.model_dump(), "files": ()})
    assert config_hash(older) == hash_of(older.model_dump(mode="json", exclude={"files"}))
    (place / "model.py").write_text("width = 1\n")
    script.work(found)


@pytest.mark.thorough
def test_the_example_runs_and_is_a_script_with_few_lines_more(tmp_path: Path) -> None:
    folder = ROOT / "examples/own"
    lines = (folder / "train.py").read_text().splitlines()
    assert 0 < len([line for line in lines if line.endswith("# study")]) <= 20
    options = ("--steps", "3", "--seeds", "2", "--set", "sweep=null", "--underpowered")
    with quickly(tmp_path):
        status, started = run(str(folder / "study.py"), tmp_path / "out", options=options)
    assert (status, len(started)) == (0, 2 * 4)
    (verdict,) = verdicts(tmp_path / "out")
    assert [each["n"] for each in verdict["arms"]] == [2, 2, 2]
    assert [each["together"] for each in verdict["interactions"]] == ["linear+no-decay"]


@pytest.mark.thorough
def test_a_command_ends_with_its_run(place: Path) -> None:
    """The process of a run is told to end as all of them are, by closing its standard input."""
    (place / "long.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"Path({str(place)!r}, 'pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    found = spec(place, f"python {place / 'long.py'} {{seed}}")
    child = subprocess.Popen(
        [sys.executable, "-m", "tilelab.study.conduct.script"],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd=ROOT,
    )
    assert child.stdin is not None
    child.stdin.write((json.dumps(found.as_json()) + "\n").encode())
    child.stdin.flush()
    pid, deadline = place / "pid", time.monotonic() + 60
    while not pid.exists() or not pid.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.stdin.close()
    assert child.wait(10) == -signal.SIGKILL
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < deadline, "the command outlived its run"
        time.sleep(0.05)
