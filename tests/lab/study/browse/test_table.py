"""Tables of runs that were made elsewhere, and the command that judges them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tilelab import stats
from tilelab.study.browse.table import read, values_of, where
from tilewise import cli
from tilewise.errors import InvalidArgument

ADAMW, MUON = {0: 3.214, 1: 3.198, 2: 3.221}, {0: 3.101, 1: 3.094, 2: 3.105}
RUNS = [("adamw", seed, loss) for seed, loss in ADAMW.items()]
RUNS += [("muon", seed, loss) for seed, loss in MUON.items()]
ASKED = ["--arm", "optimizer", "--metric", "val_loss", "--baseline", "adamw"]
WANTED = {"adamw": ADAMW, "muon": MUON}


def wandb_csv(folder: Path, **changes: Any) -> Path:
    """A table of runs as W&B exports it; ``changes`` are values of the last run."""
    path = folder / "runs.csv"
    rows: list[dict[str, Any]] = [
        {"Name": f"run-{at}", "State": "finished", "optimizer": arm, "seed": seed, "val_loss": loss}
        for at, (arm, seed, loss) in enumerate(RUNS)
    ]
    rows[-1] |= changes
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def mlflow_csv(folder: Path) -> Path:
    path = folder / "mlflow.csv"
    lines = [f"id{at},{arm},{seed},{loss}" for at, (arm, seed, loss) in enumerate(RUNS)]
    path.write_text("\n".join(["run_id,params.optimizer,params.seed,metrics.val_loss", *lines]))
    return path


def wandb_json(folder: Path) -> Path:
    """Runs with their config and their history, whose last value counts."""
    path = folder / "runs.json"
    runs = [
        {
            "name": f"run-{at}",
            "config": {"optimizer": {"value": arm}, "seed": {"value": seed}},
            "history": [
                {"_step": 1, "val_loss": 9.0},
                {"_step": 2, "val_loss": loss},
                {"_step": 3, "train_loss": 1.0},
            ],
        }
        for at, (arm, seed, loss) in enumerate(RUNS)
    ]
    path.write_text(json.dumps({"runs": runs}))
    return path


def history_lines(folder: Path) -> Path:
    """A row for each evaluation of each run."""
    path = folder / "history.jsonl"
    rows = [
        {"config": {"optimizer": arm, "seed": seed}, "_step": step, "val_loss": value}
        for arm, seed, loss in RUNS
        for step, value in ((20, loss), (10, 9.0), (30, None))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mlruns(folder: Path) -> Path:
    """The folder of MLflow: a file for each parameter, and one with the values of each metric."""
    for at, (arm, seed, loss) in enumerate([*RUNS, ("muon", 0, 9.9)]):
        run = folder / "mlruns" / "0" / f"run{at}"
        for name, text in {
            "meta.yaml": f"lifecycle_stage: {'deleted' if at == len(RUNS) else 'active'}\n",
            "params/optimizer": arm,
            "params/seed": str(seed),
            "metrics/val_loss": f"1700000000000 9.0 0\n1700000000002 {loss} 20\n",
        }.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(text)
    return folder / "mlruns"


@pytest.mark.parametrize("made", [wandb_csv, mlflow_csv, wandb_json, history_lines, mlruns])
def test_a_table_is_read(tmp_path: Path, made: Any) -> None:
    rows = read(made(tmp_path))
    assert values_of(rows, arm=["optimizer"], seed="seed", metric="val_loss") == WANTED
    named = values_of(rows, arm=["optimizer", "seed"], seed="seed", metric="val_loss")
    assert list(named)[:2] == ["adamw/0", "adamw/1"]


def test_the_folder_that_mlflow_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = client.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = tracking.create_experiment("e")
    for arm, seed, loss in RUNS:
        run = tracking.create_run(experiment).info.run_id
        tracking.log_param(run, "optimizer", arm)
        tracking.log_param(run, "seed", seed)
        tracking.log_metric(run, "val_loss", 9.0, step=0)
        tracking.log_metric(run, "val_loss", loss, step=20)
    rows = read(tmp_path / "mlruns")
    assert values_of(rows, arm=["optimizer"], seed="seed", metric="val_loss") == WANTED


def test_the_command_says_and_writes_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, values = tmp_path / "verdict.md", tmp_path / "verdict.json"
    files = ["--report", str(page), "--json", str(values)]
    words = ["study", "verdict", str(wandb_csv(tmp_path)), *ASKED, "--smallest-effect", "0.02"]
    assert cli.main([*words, *files]) == 0
    expected = stats.compare(ADAMW, MUON, smallest_effect=0.02)
    said = capsys.readouterr().out
    assert "better" in said
    assert "val_loss" in said
    assert "| muon | better | −0.111 |" in page.read_text()  # noqa: RUF001  as it prints
    written = json.loads(values.read_text())
    (found,) = written["arms"]
    assert written["mean"] == pytest.approx(3.211)
    assert (found["effect"], found["p_holm"]) == (expected.effect, expected.p_holm)


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({}, ["--arm", "optimiser"], "--arm: got 'optimiser', which is no column; required: one "),
        ({}, ["--arm", "optimiser"], "Did you mean 'optimizer'?"),
        ({}, ["--baseline", "adam"], "--baseline: got 'adam'; required: one of adamw, muon"),
        ({"val_loss": ""}, [], "--metric: got no val_loss of muon with seed 2; required: a value"),
        ({"val_loss": "low"}, [], "--metric: got 'low' in val_loss; required: numbers"),
        ({"seed": 3}, [], "--seed: got muon without seeds [2]; required: the seeds of every arm"),
        ({"seed": 3}, [], "--seeds 0,1 compares those that all have"),
        ({"seed": 1}, [], "table: got two runs of muon with seed 1; required: one run for each"),
        ({"seed": "x"}, [], "--seed: got 'x' in seed, row 6; required: whole numbers"),
        ({"optimizer": ""}, [], "--arm: got row 6 without a optimizer"),
        ({}, ["--where", "State=running"], "--where: got 'State=running'; required: a value that"),
        ({}, ["--report", "gone/a.md"], "--report: got gone/a.md (No such file or directory); re"),
        ({}, ["--json", "/"], "--json: got / ("),
        ({}, ["--seeds", "a"], "--seeds: got 'a'; required: whole numbers"),
        ({}, ["--smallest-effect", "0"], "smallest_effect: got 0.0; required: a number above 0"),
    ],
)
def test_what_is_wrong_with_a_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    asked = [*ASKED, "--smallest-effect", "0.02"]
    if words[:1] == ["--arm"]:
        asked = asked[2:]
    path = str(wandb_csv(tmp_path, **changes))
    assert cli.main(["study", "verdict", path, *asked, *words]) == 2
    assert re.sub(r"\s+", " ", message) in capsys.readouterr().err


def test_runs_that_have_not_ended_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(wandb_csv(tmp_path, State="running", val_loss=""))
    some = ["--where", "State=finished", "--seeds", "0,1"]
    assert cli.main(["study", "verdict", path, *ASKED, "--smallest-effect", "0.02", *some]) == 0
    diverged = str(wandb_csv(tmp_path, val_loss="nan"))
    assert cli.main(["study", "verdict", diverged, *ASKED, "--smallest-effect", "0.02"]) == 0
    assert "Diverged with 1 of 3 seeds (seed 2)" in capsys.readouterr().out


HEAD = "optimizer,seed,val_loss"
LINES = [f"{arm},{seed},{loss}" for arm, seed, loss in RUNS]


def values(path: Path) -> dict[str, dict[int, float | None]]:
    return values_of(read(path), arm=["optimizer"], seed="seed", metric="val_loss")


def test_mlflow_has_its_last_value_where_no_step_was_logged(tmp_path: Path) -> None:
    folder = mlruns(tmp_path)
    for path in folder.rglob("val_loss"):
        last = path.read_text().split()[4]
        path.write_text(f"17003 {last} 0\n17001 9.0 0\n17002 8.0\n")
    assert values(folder) == WANTED


def test_seeds_that_do_not_count_may_be_there_twice(tmp_path: Path) -> None:
    """As the trials of a learning rate are, which have one seed."""
    rows = read(mlruns(tmp_path))
    of: dict[str, Any] = {"arm": ["optimizer"], "seed": "seed", "metric": "val_loss"}
    more = [{**row, "run_id": f"trial {at}", "params.seed": "7"} for at, row in enumerate(rows)]
    with pytest.raises(InvalidArgument, match="got two runs of adamw with seed 7"):
        values_of(rows + more, **of)
    assert values_of(rows[:6] + more, **of, seeds=(0, 1, 2)) == WANTED


def test_mlflow_says_how_a_run_ended(tmp_path: Path) -> None:
    folder = mlruns(tmp_path)
    for at, path in enumerate(sorted(folder.rglob("meta.yaml"))):
        path.write_text(f"lifecycle_stage: active\nstatus: {3 if at < 6 else 4}\n")
    assert [row["status"] for row in read(folder)] == ["FINISHED"] * 6 + ["FAILED"]
    with pytest.raises(InvalidArgument, match="got two runs of muon with seed 0"):
        values(folder)
    rows = where(read(folder), ["status=FINISHED"])
    assert values_of(rows, arm=["optimizer"], seed="seed", metric="val_loss") == WANTED
    with pytest.raises(InvalidArgument, match="that a run has in status: FAILED, FINISHED"):
        where(read(folder), ["status=finished"])


@pytest.mark.parametrize("separator", [";", "\t", ", "])
def test_other_separators(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEAD, *LINES]).replace(",", separator), encoding="utf-8-sig")
    assert values(path) == WANTED


def test_an_object_a_line_may_have_any_text_and_any_seed(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    rows = [{"optimizer": arm, "seed": 2**53 + seed, "val_loss": loss} for arm, seed, loss in RUNS]
    text = "\n".join(json.dumps({**row, "note": "a\u2028b"}, ensure_ascii=False) for row in rows)
    path.write_text(text, encoding="utf-8-sig")
    assert list(values(path)["muon"]) == [2**53, 2**53 + 1, 2**53 + 2]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "\n".join([HEAD, "adamw,0,3,2"]), "line 2 of .* with 4 values; .* 3, as many as"),
        ("a.csv", f"{HEAD},val_loss\nadamw,0,3.2,9", "two columns val_loss; .* once"),
        ("a.csv", f'{HEAD}\n"adamw,0,3.2', r"a.csv \(unexpected end of data\); required: CSV"),
        ("a.csv", f"{HEAD}\nm\N{LATIN SMALL LETTER U WITH DIAERESIS},0,3.2", "text in UTF-8"),
        ("a.json", '[{"optimizer": "\N{LATIN SMALL LETTER U WITH DIAERESIS}"}]', "text in UTF-8"),
        ("a.json", "[" * 100_000, "required: JSON"),
        ("a.json", '[{"history": [3.2, 3.1]}]', "a history of 3.2; required: objects"),
        ("a.jsonl", '{"seed": 1}\n{"torn":', r"line 2 of .*a.jsonl \(Expecting value"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(InvalidArgument, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("named", [True, False])
def test_two_runs_are_never_one_history(tmp_path: Path, named: bool) -> None:
    """A crashed run and its repetition have the same arm and seed, and steps of their own."""
    path = tmp_path / "history.csv"
    rows = [f"r{at},{line},{step}" for at, line in enumerate(LINES) for step in (10, 20)]
    again = "r9,muon,0,9.9,20" if not named else "r9,muon,0,9.9,15"
    lines = [f"Name,{HEAD},_step", *rows, again]
    path.write_text("\n".join(line if named else line.partition(",")[2] for line in lines))
    with pytest.raises(InvalidArgument, match="got two runs of muon with seed 0"):
        values(path)


def test_an_arm_without_a_value_is_not_left_out_silently(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    rows = [f"{line},20" for line in LINES]
    path.write_text("\n".join([f"{HEAD},_step", *rows, "lion,0,,10", "lion,0,,20"]))
    with pytest.raises(InvalidArgument, match="got no val_loss of lion with seed 0; required"):
        values(path)


def test_the_command_warns_of_seeds_that_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "runs.csv", tmp_path / "page.md"
    lines = [
        f"{arm},{seed},{loss}" for arm, loss in (("adamw", 3.3), ("muon", 3.1)) for seed in (0, 1)
    ]
    path.write_text("\n".join(["optimizer,seed,loss_0.5", *lines]))
    words = ["--metric", "loss_0.5", "--smallest-effect", "0.02", "--report", str(page)]
    asked = ["--arm", "optimizer", "--baseline", "adamw", *words]
    assert cli.main(["study", "verdict", str(path), *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for text in (said, page.read_text()):
        assert "The difference is the same with every seed: do the seeds change anything?" in text
    assert "0.200 loss_0.5 [" in said, "a column's name is not cut at any point"
