"""What a user names, by name or by path; the tables of list, show and compare."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.lab.study.records_of import (
    COMMAND,
    Behaviour,
    config_of,
    experiment_of,
    folder_of,
    records_of,
    stored_in,
    study_of,
)
from tilelab.study.ask.config import Arm, Study, Sweep
from tilelab.study.ask.run import RECORD
from tilelab.study.browse import show
from tilelab.study.browse.compare import compare, pairs
from tilelab.study.browse.show import Found, find, find_run, find_study
from tilelab.study.conduct.conductor import report_again
from tilelab.study.records import store
from tilelab.study.records.events import CorruptRecordError, Sample
from tilewise.errors import InvalidArgument

STUDY = study_of(experiment_of(Arm(name="lion", changes={"optimizer.name": "lion"}), "wsd"))


def console() -> Console:
    return Console(width=160, file=io.StringIO(), record=True)


def shown(found: Found) -> str:
    to = console()
    show.show(found, to)
    return to.export_text()


def compared(first: Found, second: Found) -> str:
    to = console()
    compare(first, second, to)
    return to.export_text()


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(name)).split()


def test_the_list(tmp_path: Path) -> None:
    to = console()
    show.list_studies(tmp_path, to)
    assert "No studies" in to.export_text()
    folder = stored_in(tmp_path, STUDY, {"lion": Behaviour(diverged={0: 3}, absent=(2,))})
    show.list_studies(tmp_path, to)
    line = row(to.export_text(), folder.name)
    assert line[1:3] == ["8/9", "1"]
    assert " ".join(line).endswith(STUDY.question)
    broken = tmp_path / "broken-1"
    broken.mkdir()
    (broken / store.STUDY).write_text("{}")
    show.list_studies(tmp_path, to)
    text = to.export_text()
    assert row(text, "broken-1")[1] == "unreadable"
    assert row(text, folder.name)[1] == "8/9"


def test_a_damaged_record_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = stored_in(tmp_path, STUDY)
    record = folder / "runs/optimizers/lion/seed-0/record.jsonl"
    record.write_text("{}\n" + record.read_text())
    to = console()
    show.list_studies(tmp_path, to)
    text = to.export_text()
    assert row(text, folder.name)[1] == "8/9"
    assert f"{folder.name}:optimizers/lion/seed-0: its record is damaged" in text
    text = shown(find("optimizers/lion", tmp_path))
    assert "optimizers/lion/seed-0: its record is damaged and left out" in text
    assert row(text, "optimizers/lion/seed-1")[1] == "done"
    with pytest.raises(CorruptRecordError, match=r"seed-0/record.jsonl, line 1"):
        find("optimizers/lion/seed-0", tmp_path)


def test_control_characters_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    """What a record and ``study.json`` say, wherever it is printed."""
    evil = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\x08"
    seen = r"\x1b]0;owned\x07\x1b[31m\x9b2J\x0d\x08"
    study = STUDY.model_copy(update={"question": f"Why {evil}?"})
    records = records_of(study)
    name = "optimizers/lion/seed-0"
    record = records[name]
    record.starts[0] = replace(
        record.start, environment={"chip": evil}, corpus={"name": evil}, groups={evil: ["a"]}
    )
    record.sample = Sample(evil, evil)
    folder = store.folder_of(study, tmp_path)
    folder_of(folder, study, records, command=f"run {evil}", environment={"chip": evil})
    printed = io.StringIO()
    to = Console(width=400, file=printed, force_terminal=True, color_system=None)
    show.list_studies(tmp_path, to)
    show.show(find(name, tmp_path), to)
    show.show(find(folder.name, tmp_path), to)
    report_again(folder, to)
    text = printed.getvalue() + (folder / "report.md").read_text()
    assert text.count(seen) >= 8
    assert f"Why {seen}?" in text
    assert not set(text) & set("\x1b\x07\x9b\r\x08")
    assert "\x1b" not in (folder / "report.html").read_text()


def test_a_run(tmp_path: Path) -> None:
    behaviour = Behaviour(starts=(20,), kernels=("sdpa flash (cpu)", "sdpa math"))
    stored_in(tmp_path, STUDY, {"lion": behaviour})
    text = shown(find("optimizers/lion/seed-1", tmp_path))
    for words in (
        "optimizers/lion/seed-1: done",
        "step 0 at 2026-01-02T03:04:05+00:00, step 20 at",
        "layer 0: sdpa flash (cpu) x40, layer 1: sdpa math x40",
        "activations 3 MB",
        "no decay  1 tensors: h.0.ln_1.weight",
        "chip test chip",
        "5,120 tokens/s",  # 256 tokens in 0.05 s
        "optimizer.lr",
        "█",
    ):
        assert words in text, words
    # An evaluation per line, the last at the end of the budget.
    assert all(row(text, f"{step} ") for step in (0, 10, 20, 30, 40))


def test_a_run_that_diverged_and_one_that_only_began(tmp_path: Path) -> None:
    behaviours = {"lion": Behaviour(diverged={0: 3}), "wsd": Behaviour(stopped={0: 0})}
    stored_in(tmp_path, STUDY, behaviours)
    text = shown(find("optimizers/lion/seed-0", tmp_path))
    assert "diverged (the loss of step 3 is not finite)" in text
    text = shown(find("optimizers/wsd/seed-0", tmp_path))
    assert "incomplete" in text
    assert "not measured yet" in text
    assert "not known yet" in text


def test_the_runs_of_a_part(tmp_path: Path) -> None:
    stored_in(tmp_path, STUDY)
    text = shown(find("optimizers/lion", tmp_path))
    assert row(text, "optimizers/lion/seed-2")[1:3] == ["done", "40"]
    assert "baseline" not in text
    text = shown(find("synthetic", tmp_path))
    assert "optimizers: baseline, lion, wsd" in text
    assert COMMAND in text


def test_arms_are_compared_seed_by_seed(tmp_path: Path) -> None:
    finals = {0: 2.0, 1: 2.2, 2: 2.4}
    better = {seed: value - 0.1 for seed, value in finals.items()}
    stored_in(
        tmp_path,
        STUDY,
        {
            "lion": Behaviour(finals=better, pace=2.0, kernels=("sdpa math",)),
            "wsd": Behaviour(finals=finals),
        },
    )
    text = compared(find("optimizers/wsd", tmp_path), find("optimizers/lion", tmp_path))
    assert "optimizer.name: adamw in A, lion in B" in text
    # Seeds differ by 0.4, the arms by 0.1 at every one of them.
    line = row(text, "bits per byte")
    assert line[3:6] == ["2.2000", "2.1000", "-0.1000"]
    assert line[6:8] == ["[-0.1000,", "-0.1000]"]
    assert row(text, "tokens/s")[1:] == ["5,120", "10,240", "x2.000", "[x2.000,", "x2.000]"]
    assert "3 paired seeds." in text
    assert "Attention kernels: tilewise cpu in A, sdpa math in B." in text
    assert "the same to the last bit" not in text


def test_what_did_not_finish_is_left_out_and_named(tmp_path: Path) -> None:
    stored_in(tmp_path, STUDY, {"lion": Behaviour(diverged={0: 4}, stopped={1: 5})})
    text = compared(find("optimizers/wsd", tmp_path), find("optimizers/lion", tmp_path))
    assert "1 paired seed." in text
    assert (
        "Left out of B: optimizers/lion/seed-0 (diverged), optimizers/lion/seed-1 (not done)."
        in text
    )
    stored_in(tmp_path / "b", STUDY, {"lion": Behaviour(absent=(0, 1), stopped={2: 4})})
    text = compared(find("optimizers/wsd", tmp_path), find("optimizers/lion", tmp_path / "b"))
    assert "nothing is compared" in text


def test_two_runs_are_a_pair_whatever_their_seeds(tmp_path: Path) -> None:
    stored_in(tmp_path, STUDY)
    first, second = (find(f"optimizers/wsd/seed-{seed}", tmp_path) for seed in (0, 1))
    assert "1 paired seed." in compared(first, second)
    assert "the same to the last bit" in compared(first, first)


def test_two_studies_arm_by_arm(tmp_path: Path) -> None:
    one = stored_in(tmp_path, STUDY)
    sweep = Sweep(values=dict.fromkeys(("baseline", "wsd"), (0.1, 0.2)), seeds=(9,))
    other = study_of(experiment_of("wsd", baseline=config_of(**{"optimizer.lr": 0.5}), sweep=sweep))
    two = stored_in(tmp_path, other)
    first, second = find(str(one), tmp_path), find(str(two), tmp_path)
    text = compared(first, second)
    assert "optimizers/baseline\n" in text
    assert "optimizers/wsd\n" in text
    assert "optimizers/lion" not in text
    assert "optimizer.lr: 0.003 in A, 0.5 in B" in text
    # Trials are no seeds of an arm.
    assert pairs(first.records, second.records).seeds == [0, 1, 2]
    three = stored_in(tmp_path, study_of(experiment_of("muon", name="other")))
    with pytest.raises(InvalidArgument, match="no arm in common"):
        compared(first, find(str(three), tmp_path))


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "+0.0000"), (-0.11234, "-0.1123"), (3e-8, "+3e-08")]
)
def test_differences(value: float, words: str) -> None:
    assert show.difference(value) == words


def test_the_speed_of_a_systems_arm_that_has_not_passed_is_withheld(tmp_path: Path) -> None:
    changes = {"attention.implementation": "sdpa"}
    study = study_of(experiment_of(Arm(name="sdpa", kind="systems", changes=changes)))
    stored_in(tmp_path, study, {"sdpa": Behaviour(effect=0.5)})
    runs = shown(find("synthetic", tmp_path))
    assert "withheld" in row(runs, "optimizers/sdpa/seed-0")
    assert "withheld" not in row(runs, "optimizers/baseline/seed-0")
    assert "optimizers/sdpa: A systems arm has to be shown to change nothing" in runs
    run = shown(find("optimizers/sdpa/seed-0", tmp_path))
    assert "tokens/s" not in run
    assert "withheld" in row(run, "10 ")
    text = compared(*(find(f"optimizers/{arm}", tmp_path) for arm in ("baseline", "sdpa")))
    assert row(text, "tokens/s")[1:] == ["withheld"] * 3
    assert "this one is worse" in text
    passed = tmp_path / "passed"
    stored_in(passed, study, {"sdpa": Behaviour(effect=0.0)})
    assert "withheld" not in shown(find("synthetic", passed))
    text = compared(*(find(f"optimizers/{arm}", passed) for arm in ("baseline", "sdpa")))
    assert row(text, "tokens/s")[1] == "5,120"


def made(place: Path, study: Study, touched: int = 1) -> Path:
    """The folder of a study that has run, last touched then."""
    folder = stored_in(place, study)
    for path in (folder / store.STUDY, *folder.rglob(RECORD)):
        os.utime(path, (touched, touched))
    return folder


def test_by_name(tmp_path: Path) -> None:
    old = made(tmp_path, study_of(experiment_of("muon", name="other")))
    new = made(tmp_path, study_of(), 2)
    assert find_study("synthetic", tmp_path) == new
    assert find_study(old.name, tmp_path) == old
    assert find_study(str(old), tmp_path / "elsewhere") == old
    assert len(find("synthetic", tmp_path).records) == 9
    assert find("optimizers/lion", tmp_path).records.keys() == {
        f"optimizers/lion/seed-{seed}" for seed in (0, 1, 2)
    }
    assert list(find("optimizers/lion/seed-1", tmp_path).records) == ["optimizers/lion/seed-1"]
    # What the newest study does not have is looked for in older ones.
    assert find("other/muon", tmp_path).folder == old
    named = find(f"{old.name}:other/muon/seed-0", tmp_path)
    assert (named.part, len(named.records)) == ("other/muon/seed-0", 1)
    assert named.name == f"{old.name}:other/muon/seed-0"
    assert find("optimizers", tmp_path).part == "optimizers"


def test_by_path(tmp_path: Path) -> None:
    folder = made(tmp_path, study_of())
    nowhere = tmp_path / "nowhere"
    assert find(str(folder), nowhere).part == ""
    assert find(str(folder / "runs/optimizers/lion"), nowhere).part == "optimizers/lion"
    run = find(str(folder / "runs/optimizers/lion/seed-0"), nowhere)
    assert list(run.records) == ["optimizers/lion/seed-0"]
    assert run.folder == folder


def test_a_single_run(tmp_path: Path) -> None:
    folder = made(tmp_path, study_of())
    place, record = find_run("optimizers/lion/seed-1", tmp_path)
    assert place == folder / "runs/optimizers/lion/seed-1"
    assert (record.start.arm, record.start.seed) == ("lion", 1)
    with pytest.raises(InvalidArgument, match=r"'optimizers/lion', which is 3 runs.*lion/seed-0"):
        find_run("optimizers/lion", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("synthetik", "in .* there is synthetic-"),
        ("optimizers/lino", "Did you mean 'optimizers/lion'"),
        ("synthetic:optimizers/lion/seed-7", "of which nothing has run.*seed-"),
        ("nothing:optimizers", "study: got 'nothing'"),
        ("lion/seed-0", "Did you mean 'optimizers/lion/seed-0'"),
    ],
)
def test_what_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match="there is none"):
        find_study("laptop", tmp_path)
    made(tmp_path, study_of())
    with pytest.raises(InvalidArgument, match=message):
        find(name, tmp_path)
    with pytest.raises(InvalidArgument, match="in no study"):
        find(str(tmp_path), tmp_path)
