"""``tilewise study``: what is understood, what is refused, what is asked for."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.lab.study.records_of import stored_in, study_of
from tilelab.study import command, recipes
from tilelab.study.ask import values as registry
from tilelab.study.conduct.conductor import Conductor
from tilelab.study.records import store
from tilewise import cli

RECIPE = '''
from tilelab.study.ask.config import *

def mine(*, rate: float = 0.1, name: str = "mine") -> Study:
    """A study of one's own."""
    run = RunConfig(optimizer=Optimizer(name="adamw", lr=rate))
    arms = (Arm(name="lion", changes={"optimizer": {"name": "lion", "lr": 0.5}}),)
    experiment = Experiment(
        name="e", question="?", baseline=run, arms=arms, smallest_effect=0.1, seeds=(0, 1, 2)
    )
    return Study(name=name, question="?", experiments=(experiment,))
'''


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Conductor]:
    """What the conductor is asked, in place of its doing it."""
    requests: list[Conductor] = []

    def conduct(self: Conductor, console: Console) -> int:
        requests.append(self)
        return 7

    monkeypatch.setattr(Conductor, "conduct", conduct)
    return requests


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "my study.py"
    path.write_text(RECIPE)
    return f"{path}:mine"


@pytest.mark.parametrize("argv", [[], ["run"], ["laptop"], ["run", "laptop"]])
def test_the_laptop_is_what_is_run(argv: list[str], asked: list[Conductor]) -> None:
    assert command.main(argv) == 7
    (request,) = asked
    assert request.study.name == "laptop"
    execution = request.execution
    assert (request.jobs, execution.threads, execution.device) == (None, 1, "cpu")
    assert request.out == store.studies_folder()
    assert request.command.startswith("tilewise study run")


def test_everything_that_can_be_said(
    recipe: str, asked: list[Conductor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", recipe, "--rate", "0.25", "--name=other", "--set", "optimizer.lr=0.125"]
    argv += ["--set", "e.seeds=0,1", "--jobs", "3", "--threads", "2", "--device", "cuda"]
    argv += ["--out", str(tmp_path / "there"), "--yes", "--on", "ray", "--processes", "2"]
    argv += ["--strategy", "fsdp", "--track", "tensorboard", "--track", "x.py:f"]
    assert command.main(argv) == 7
    (request,) = asked
    (experiment,) = request.study.experiments
    assert request.study.name == "other"
    assert experiment.seeds == (0, 1)
    assert experiment.baseline.optimizer.options["lr"] == 0.125
    execution = request.execution
    assert (request.jobs, execution.threads, execution.device) == (3, 2, "cuda")
    assert (request.on, execution.processes, execution.strategy) == ("ray", 2, "fsdp")
    assert request.track == ("tensorboard", "x.py:f")
    assert request.out == tmp_path / "there"
    assert request.confirm is None
    # The command is as it was typed, ready for a shell.
    assert f"'{recipe}' --rate 0.25 --name=other" in request.command
    assert request.command.count(" run ") == 1
    # What an arm changes itself it keeps, and that is said.
    assert "e/lion keeps its own optimizer.lr: 0.5" in capsys.readouterr().out


def test_a_recipes_options_keep_their_types(recipe: str, asked: list[Conductor]) -> None:
    command.main(["--rate", "1e-3", "--jobs", "2", recipe])  # in any order
    assert asked[0].jobs == 2
    assert asked[0].study.experiments[0].baseline.optimizer.options["lr"] == 0.001
    assert command.main(["wikitext", "--preset", "h200"]) == 7
    assert asked[1].study.name == "wikitext-h200"


@pytest.mark.parametrize("name", recipes.names())
def test_the_command_takes_no_option_of_a_recipe(name: str) -> None:
    options = {f"--{each.replace('_', '-')}" for each in recipes.find(name).options}
    assert options.isdisjoint(command._parser()._option_string_actions)


def test_a_long_study_is_asked_about_on_a_terminal_only(
    asked: list[Conductor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("y\nno\n\n"))
    command.main([])
    confirm = asked[0].confirm
    assert confirm is not None
    # After the three lines comes the end of the input: Ctrl-D.
    assert [confirm("3:00 h") for _ in range(4)] == [True, False, False, False]
    command.main(["--yes"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    command.main([])
    assert [request.confirm for request in asked[1:]] == [None, None]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lap-top"], "Did you mean 'laptop'"),
        (["--set", "optimiser.lr=1"], "Did you mean 'optimizer'"),
        (["--set", "optimizer.lr"], "path=value"),
        (["--stpes", "5"], "Did you mean '--steps'"),
        (["--job", "5"], "Did you mean '--jobs'"),
        (["--contextparallel", "2"], "Did you mean '--context-parallel'"),
        (["--out", "x", "--plain_up_to", "5"], "required: one of --steps, --seeds, --set"),
        (["--jobs", "0"], "0 is not 1 or more"),
        (["--jobs", "two"], "two is not 1 or more"),
        (["--device", "abacus"], "abacus"),
        (["laptop", "kernels"], "one recipe at a time"),
        (["laptop", "--steps"], "--steps: give it a value"),
        (["nowhere.py:mine"], "no file"),
        (["show"], "the following arguments are required"),
        (["show", "x", "--out", "/nonexistent"], "there is none"),
        (["compare", "x"], "required: b"),
        (["report", "x", "--out", "/nonexistent"], "there is none"),
        (["export", "x"], "required: folder"),
        (["export", "x", "y", "--out", "/nonexistent"], "there is none"),
        (["recipes", "more"], "unrecognized"),
        (["choices", "--out", "x"], "unrecognized"),
    ],
)
def test_wrong_usage_has_status_2(
    argv: list[str], message: str, asked: list[Conductor], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = command.main(argv)
    except SystemExit as stopped:
        status = int(str(stopped.code))
    assert status == 2
    assert message in capsys.readouterr().err
    assert asked == []


def test_help_names_every_subcommand_recipe_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    text = capsys.readouterr().out
    for words in (*command.SUBCOMMANDS, "--set", "--jobs", "--threads", "--out", "--yes"):
        assert words in text
    for name in ("run", "show", "list"):
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        assert "--out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["demo", "--help"])
    said = capsys.readouterr().out
    assert "study run kernels" in " ".join(said.split())
    for option in recipes.find("kernels").options:
        assert f"--{option.replace('_', '-')}" in said
    assert command.main(["recipes"]) == 0
    text = capsys.readouterr().out
    for words in ("laptop (the default)", "laptop-full", "wikitext", "--preset cpu", "kernels"):
        assert words in text
    assert command.main(["choices"]) == 0
    text = capsys.readouterr().out
    kinds: tuple[registry.Kind, ...] = ("optimizer", "schedule", "variant", "task")
    for kind in kinds:
        for name in registry.names(kind):
            assert f"  {name}: " in text
    assert "betas=(0.9, 0.95)" in text


def test_what_was_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored_in(tmp_path, study_of())
    where = ["--out", str(tmp_path)]
    assert cli.main(["study", "list", *where]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if folder.name in line]
    assert line.split()[:2] == [folder.name, "9/9"]
    assert cli.main(["study", "show", "optimizers/lion/seed-0", *where]) == 0
    assert "optimizers/lion/seed-0: done" in capsys.readouterr().out
    assert cli.main(["study", "compare", "optimizers/lion", "optimizers/wsd", *where]) == 0
    assert "3 paired seeds." in capsys.readouterr().out
    assert cli.main(["study", "report", "synthetic", *where]) == 0
    assert f"Report: {folder / 'report.html'}" in capsys.readouterr().out
    assert (folder / "report.md").exists()
    record = folder / "runs/optimizers/lion/seed-0/record.jsonl"
    record.write_text("nonsense\n" + record.read_text())
    assert cli.main(["study", "report", "synthetic", *where]) == 1
    assert "record.jsonl, line 1: not an event" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("x = 1\ndef study(:\n", "line 2: invalid syntax (def study(:)"),
        ("def study():\nreturn 1\n", "line 2: expected an indented block"),
    ],
)
def test_a_syntax_error_in_a_study_is_one_line(
    text: str, seen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert cli.main(["study", "run", f"{path}:study"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tilewise study: {path}: got {path}, {seen}")
    assert error.count("\n") == 1


def test_the_demo_is_the_study_of_the_kernels(
    asked: list[Conductor], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--text", "2024", "--seeds", "2", "--set", "optimizer.lr=0.5", "--jobs", "1"]
    assert cli.main(["demo", *argv]) == 7
    assert cli.main(["study", "run", "kernels", *argv]) == 7
    demo, study = asked
    assert demo == study
    assert demo.command == f"tilewise study run kernels {' '.join(argv)}"
    # A file may be called like a number.
    assert demo.study.experiments[0].baseline.data.source == "2024"
    assert cli.main(["demo", "--steps", "many"]) == 2
    assert capsys.readouterr().err.startswith("tilewise demo: steps: got 'many'")
    for wrong in (["laptop"], ["--text"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["demo", *wrong])
        assert stopped.value.code == 2
