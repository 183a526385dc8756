"""``docs/studies.md`` tells the truth: its example runs, its commands are taken, its keys exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.blocks import block_of, executes
from tests.lab.study.in_process import quickly, run, verdicts
from tests.lab.study.train.toys import text
from tilelab.study import command, recipes
from tilelab.study.ask import designs
from tilelab.study.ask.config import Arm, Experiment, Frozen, RunConfig
from tilelab.study.ask.values import Kind, find, names
from tilelab.study.choices.variants import ENCODER
from tilelab.study.conduct.conductor import Conductor
from tilelab.study.data import corpus
from tilelab.study.plan import planned
from tilelab.study.tasks import images, long
from tilelab.study.tasks.glue import GlueTask
from tilelab.study.tasks.scores import QUARTERS
from tilewise import cli

PAGE = (Path(__file__).parents[3] / "docs/studies.md").read_text()
LINES = re.findall(r"^    (tilewise study .*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's example as a file."""
    path = tmp_path_factory.mktemp("page") / "my_study.py"
    path.write_text(block_of("docs/studies.md", 2).code)
    path.with_name("mine.py").write_text(block_of("docs/studies.md", 0).code)
    runs = ["optimizer,seed,val_loss,State"]
    runs += [
        f"{arm},{seed},{2 + seed + 0.1 * len(arm)},finished"
        for arm in ("adamw", "muon")
        for seed in range(3)
    ]
    path.with_name("runs.csv").write_text("\n".join(runs))
    return path


@executes("docs/studies.md", 2)
def test_the_example_is_as_many_runs_as_it_says(example: Path) -> None:
    study = recipes.find(f"{example}:choices").study()
    assert f"`choices` has at most {len(planned(study))} runs" in PAGE
    (reviews,) = recipes.find(f"{example}:reviews").study().experiments
    assert reviews.baseline.data.source.startswith("hub:")


@pytest.mark.parametrize("line", LINES)
def test_every_command_is_taken(
    line: str, example: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever runs a study comes to the conductor; what looks at one is a subcommand."""
    asked: list[Conductor] = []

    def conduct(self: Conductor, _: object) -> int:
        asked.append(self)
        return 0

    monkeypatch.chdir(example.parent)
    monkeypatch.setenv("TILEWISE_STUDIES", str(tmp_path))
    monkeypatch.setattr(Conductor, "conduct", conduct)
    words = shlex.split(line, comments=True)[1:]
    if words[1] in ("show", "compare", "export"):
        assert words[1] in command.SUBCOMMANDS
        asked_of = words[2:3] if words[1] == "export" else words[2:]
        experiments = recipes.find(f"{example}:choices").study().experiments
        known = {f"{each.name}/{arm}" for each in experiments for arm in each.arm_names}
        assert {each.removesuffix("/seed-0") for each in asked_of} <= known
        return
    assert cli.main(words) == 0
    looks = words[1] in command.SUBCOMMANDS or "--dry-run" in words
    assert len(asked) == (0 if looks else 1)


CHOSEN = ("task", "optimizer", "schedule", "variant", "dropout")  # told as a whole


def fields(kind: type[Frozen], path: str = "") -> Iterator[str]:
    """The dotted paths of a config's values."""
    for name, field in kind.model_fields.items():
        part: Any = field.annotation
        if isinstance(part, type) and issubclass(part, Frozen) and name not in CHOSEN:
            yield from fields(part, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_every_key_is_there() -> None:
    code = re.findall(r"`([^`\n]+)`", PAGE)
    named = {word for each in code for word in re.split(r"[ ,=()]", each)}
    keys = {re.sub(r"(length_warmup)\..*", r"\1", key) for key in fields(RunConfig)}
    keys |= {*fields(Arm), *(key for key in Experiment.model_fields)}
    assert sorted(keys - named) == []
    rules = (designs.Sweep, designs.Halving, designs.Sequential, designs.Design)
    for rule in (*rules, designs.Combine, designs.Confirm, designs.Ladder):
        assert {rule.__name__, *rule.model_fields} - named == set()


@pytest.mark.parametrize("kind", ["task", "variant"])
def test_every_choice_is_there_with_its_options(kind: Kind) -> None:
    for name in names(kind):
        assert f"`{name}`" in PAGE, f"docs/studies.md does not name the {kind} {name}"
        for option, standard in find(kind, name).defaults.items():
            assert f"`{option}={standard}`" in PAGE, f"docs/studies.md: the {kind} {name}"


@pytest.mark.parametrize("kind", ["optimizer", "schedule"])
def test_every_name_is_there(kind: Kind) -> None:
    missing = [name for name in names(kind) if f"`{name}`" not in PAGE]
    assert not missing, f"docs/studies.md does not name the {kind} {missing}"


@pytest.mark.parametrize("task", sorted({*names("task")} - {"script"}))
def test_every_metric_of_a_task_is_in_its_row(task: str) -> None:
    """Those of data sets of GLUE are the paper's, and quarters by length are said in words."""
    metrics = find("task", task).function().metrics if task != "glue" else ()
    (row,) = (line for line in PAGE.splitlines() if re.match(rf"\| `{task}` \| `\w+` \|", line))
    missing = [each for each in metrics if f"`{each}`" not in row and each not in QUARTERS]
    assert not missing, f"docs/studies.md: the row of {task} does not name {missing}"


def test_every_source_with_a_name_is_there() -> None:
    sources = {*corpus.NAMES, *images.NAMED, GlueTask.place[0]}
    sources |= {each.place[0] for each in (long.TextClassification, long.Documents, long.ListOps)}
    missing = [name for name in sources if f"`{name.removesuffix('-raw')}`" not in PAGE]
    assert not missing, f"docs/studies.md does not name the data.source {missing}"


def test_every_subcommand_is_there() -> None:
    shown = "\n".join(LINES)
    asked = [name for name in command.SUBCOMMANDS if name != "run"]
    assert [name for name in asked if not re.search(rf"\b{name}\b", shown)] == []


def test_what_an_encoder_sees_is_said() -> None:
    (line,) = re.findall(r"- for an encoder, (.*?);", PAGE, re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", line)) - {"causal"} == set(ENCODER)


@pytest.mark.slow
def test_the_example_runs_to_its_end(example: Path) -> None:
    (example.parent / "text.txt").write_bytes(text(8000))
    tiny = (
        "--steps",
        "8",
        "--underpowered",
        "--seeds",
        "3",
        "--source",
        str(example.parent / "text.txt"),
    )
    small = ("model.layers=1", "model.heads=2", "model.width=16", "model.context=32")
    more = [
        word
        for each in (*small, "evaluation.windows=4", "staged.sweep.multiples=1,2")
        for word in ("--set", each)
    ]
    with quickly(example.parent):
        status, _ = run(f"{example}:choices", example.parent / "out", options=(*tiny, *more))
    assert status == 0
    staged, *later = verdicts(example.parent / "out")
    assert {each["label"] for each in staged["arms"]}.isdisjoint({"incomplete", "diverged"})
    names = [each["experiment"] for each in later]
    assert names == ["staged.combine", "staged.confirm", "crossed"]
