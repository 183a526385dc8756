"""What a study would take: timed here, or counted for a GPU that is not here."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.lab.study.conduct.conducting import conductor_of
from tests.lab.study.records_of import (
    STEP_S,
    Behaviour,
    config_of,
    experiment_of,
    records_of,
    study_of,
)
from tests.lab.study.train.toys import tokens_of
from tilelab.study import command, recipes
from tilelab.study.ask.config import (
    Arm,
    Attention,
    Budget,
    Data,
    Evaluation,
    Ladder,
    Model,
    RunConfig,
    Training,
    Variant,
    change,
)
from tilelab.study.ask.overrides import apply
from tilelab.study.ask.run import Execution
from tilelab.study.conduct import predict as forecasts
from tilelab.study.conduct.conductor import Conductor
from tilelab.study.conduct.forks import can_be_forked
from tilelab.study.conduct.predict import (
    Price,
    dry_run,
    forecast_s,
    gpu_named,
    predict,
    price,
    run_s,
)
from tilelab.study.need import gpu_need, need, parameters
from tilelab.study.plan import planned
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import folder_of
from tilelab.study.tasks.task import Prepared, data_key
from tilewise.chips import CHIPS
from tilewise.errors import InvalidArgument, Unsupported

H200 = CHIPS["h200"]
SMALL = RunConfig(
    model=Model(layers=12, heads=12, width=768, context=1024),
    data=Data(tokenizer="gpt2"),
    attention=Attention(implementation="plain"),
    training=Training(batch=8, accumulation=2, precision="bf16"),
    budget=Budget(steps=100),
    evaluation=Evaluation(every=50, windows=48),
)


def with_(**changes: Any) -> RunConfig:
    return change(SMALL, {key.replace("__", "."): value for key, value in changes.items()})


def test_products_and_bytes_are_those_counted_by_hand() -> None:
    found, total = predict(SMALL, H200), 124_439_808  # GPT-2 small, as published
    assert parameters(SMALL) == total
    tokens = 8 * 2 * 1024
    assert found.products_s == pytest.approx(6 * (total - 1024 * 768) * tokens / 989.4e12)
    moved = 2 * (4 * need(SMALL).activations + 14 * total) + 28 * total
    assert found.rest_s == pytest.approx(moved / 4800e9)
    examined = 3 * 48 / 16 / 3  # three evaluations, a third of a step for 16 sequences
    assert found.run_s == pytest.approx(5 + (100 + examined) * found.step_s)
    assert found.memory_bytes == gpu_need(SMALL).total
    untied = with_(model__tied=False)  # the tokens are looked up, and the head multiplies
    assert predict(untied, H200).products_s == found.products_s


def test_attention_is_that_of_the_io_model() -> None:
    plain, ours = (
        predict(with_(attention__implementation=each), H200) for each in ("plain", "tilewise")
    )
    # The matrix, 2 bytes a pair, is passed over many times; at the least it is written and read.
    pairs = 8 * 2 * 12 * 1024**2 * 12
    assert plain.attention_s > 2 * 2 * pairs / 4800e9
    assert ours.attention_s < plain.attention_s / 4
    # Four products forward and ten backward of each visible pair, 64 channels, at the peak.
    assert ours.attention_s > 14 * 64 * (pairs / 2) / 989.4e12
    assert (plain.products_s, plain.memory_bytes > ours.memory_bytes) == (ours.products_s, True)
    assert predict(with_(attention__implementation="sdpa"), H200).attention_s == ours.attention_s
    # What torch's kernel on a processor lacks decides nothing for a chip.
    fused, ours = (
        predict(with_(attention__implementation=each, model__dropout__attention=0.1), H200)
        for each in ("sdpa", "tilewise")
    )
    assert (fused.attention_s, fused.memory_bytes) == (ours.attention_s, ours.memory_bytes)


def test_what_grows_with_what() -> None:
    base = predict(with_(attention__implementation="tilewise"), H200)
    again = predict(with_(attention__implementation="tilewise", training__checkpointing=True), H200)
    assert again.products_s == pytest.approx(base.products_s * 4 / 3)
    assert again.memory_bytes < base.memory_bytes
    slower = predict(with_(attention__implementation="tilewise"), CHIPS["a100"])
    assert slower.step_s > 1.5 * base.step_s
    # Twice the pairs of as many tokens; tiles on the diagonal are few at these lengths.
    long, longer = (
        with_(attention__implementation="tilewise", model__context=n, training__batch=8192 // n)
        for n in (4096, 8192)
    )
    assert predict(longer, H200).attention_s > 1.9 * predict(long, H200).attention_s


def test_what_cannot_be_counted_is_refused() -> None:
    drawn = with_(attention=Attention(variant=Variant(name="bigbird")).model_dump())
    with pytest.raises(Unsupported, match="prediction of bigbird"):
        predict(drawn, H200)
    with pytest.raises(InvalidArgument, match=r"--chip: got 'this'.*a GPU"):
        gpu_named("this")
    with pytest.raises(InvalidArgument, match="one of this, a100"):
        gpu_named("h201")


def printed(study: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(dry_run(study, H200))
    return out.getvalue()


def test_the_table_has_every_arm_its_hours_and_its_memory() -> None:
    # At 8,192 tokens each tile of a pattern is judged by itself, which takes seconds.
    whole = recipes.find("h200").study()
    quick = [each.name for each in whole.experiments if each.name != "passages-8192"]
    study = apply(whole, [f"experiments={','.join(quick)}"])
    text = printed(study)
    lines = text.splitlines()
    for experiment in study.experiments:
        assert any(f"{experiment.name} " in line for line in lines), experiment.name
    runs = planned(study)
    seconds = sum(predict(run.config, H200).run_s for run in runs)
    assert f"{len(runs)} runs, {seconds / 3600:,.1f} hours, one after" in text
    assert "needs more than" not in text
    (line,) = [line for line in lines if "medium-16k" in line and "GB" in line]
    memory = need(study.experiments[9].baseline).total
    assert f"{memory / 1e9:,.1f} GB" in line
    assert "take it for the least" in text
    study = recipes.find("kernels").study()
    large = {"baseline.attention.implementation": "plain", "baseline.training.batch": 64}
    long = change(study.experiments[1], large)
    text = printed(change(study, {"experiments": [long.model_dump(mode="json")]}))
    assert "! needs more than the chip's 141 GB: long/sdpa" in text


def test_a_pattern_saves_the_pairs_that_it_leaves_out() -> None:
    found = {each.name: each for each in recipes.find("h200").study().experiments}
    experiment = found["passages-2048"]
    full, plain, window, butterfly = (
        predict(experiment.config_of(arm), H200)
        for arm in ("tilewise", "plain", "window-global", "butterfly")
    )
    assert window.attention_s < butterfly.attention_s < 0.4 * full.attention_s
    assert full.attention_s < plain.attention_s
    assert window.products_s == butterfly.products_s == plain.products_s
    assert window.memory_bytes == full.memory_bytes


def test_evaluations_that_are_not_counted_are_told() -> None:
    assert "final_stride" not in printed(recipes.find("kernels").study())
    text = printed(recipes.find("wikitext").study(preset="h200"))
    assert "(evaluation.final_stride) is not." in text
    assert "of examples are not" not in text
    assert "of examples are not counted." in printed(recipes.find("fine-tuning").study())


def test_the_command_prints_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Conductor, "conduct", None)  # whoever calls it fails
    out = ["--out", str(tmp_path / "studies")]
    only = ["--set", "experiments=small-1k"]
    assert command.main(["h200", "--dry-run", "--seeds", "3", *only, *out]) == 0
    assert "h200 on one NVIDIA H200 SXM, predicted" in capsys.readouterr().out
    assert command.main(["kernels", "--dry-run", "--chip", "a100", *out]) == 0
    assert "kernels on one NVIDIA A100" in capsys.readouterr().out
    assert not (tmp_path / "studies").exists()
    assert command.main(["kernels", "--dry-run", *out]) == 2
    assert "--chip h200" in capsys.readouterr().err
    assert command.main(["kernels", "--chip", "h200", *out]) == 2
    assert "--dry-run too" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_does_not_start_without_a_gpu(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    study = recipes.find("h200").study()
    ours = conductor_of(study, tmp_path / "out", device=device)
    words = rf"--device: got {device}.*NVIDIA H200 SXM.*--dry-run.*--set chip="
    with pytest.raises(InvalidArgument, match=words):
        ours.conduct(Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()


def test_a_study_that_was_cut_down_may_run_anywhere() -> None:
    study = recipes.find("h200").study()
    anywhere = apply(study, ["chip=", "experiments=small-1k"])
    assert anywhere.chip == ""
    conductor_of(anywhere, Path()).check_chip()
    assert folder_of(apply(study, ["chip="]), Path()) == folder_of(study, Path())
    with pytest.raises(InvalidArgument, match=r"chip: got 'h201'"):
        apply(study, ["chip=h201"])


PRICE = Price(layer=0.1, rest=0.2)
CPU = torch.device("cpu")


def seconds(**changes: Any) -> float:
    data = tokens_of(bytes(64_000))
    return run_s(config_of(**changes), PRICE, data) - forecasts.START_S


def test_a_run_is_its_steps_and_evaluations() -> None:
    sequence = 0.2 + 2 * 0.1
    # 40 steps of 4 sequences; 5 evaluations (the first weights too) of 4 windows, a third each.
    assert seconds() == pytest.approx(40 * 4 * sequence + 5 * 4 * sequence / 3)
    assert seconds(**{"training.accumulation": 2}) == pytest.approx(
        80 * 4 * sequence + 5 * 4 * sequence / 3
    )
    assert seconds(**{"training.checkpointing": True}) == pytest.approx(
        40 * 4 * sequence * 4 / 3 + 5 * 4 * sequence / 3
    )
    assert seconds(**{"training.compile": True}) > seconds() + 30
    # The last evaluation goes over all of the text: 6400 / 32 windows.
    assert seconds(**{"evaluation.final_stride": 32}) == pytest.approx(
        40 * 4 * sequence + (4 * 4 + 200) * sequence / 3
    )


def test_one_calibration_for_all_runs_that_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunConfig] = []
    tokens = tokens_of()
    real = price(config_of(**{"training.precision": "bf16"}), tokens, CPU)
    assert 0 <= min(real) <= max(real) < 1
    assert sum(real) > 1e-5

    def remember(config: RunConfig, data: Prepared, device: torch.device) -> Price:
        asked.append(config)
        assert (data, device) == (tokens, CPU)
        return PRICE

    monkeypatch.setattr(forecasts, "price", remember)
    arms = (
        Arm(name="lion", changes={"optimizer.name": "lion"}),
        Arm(name="deep", changes={"model.layers": 8}),
        Arm(name="plain", changes={"attention.implementation": "plain"}),
    )
    tasks = planned(study_of(experiment_of(*arms)))
    corpora = dict.fromkeys((data_key(run.config) for run in tasks), tokens)
    found = forecast_s(tasks, corpora, Execution(), {})
    assert [config.attention.implementation for config in asked] == ["tilewise", "plain"]
    assert found.keys() == {run.name for run in tasks}
    assert found["optimizers/deep/seed-0"] > found["optimizers/lion/seed-0"]


def test_records_correct_the_forecast_of_their_kind_and_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecasts, "price", lambda *_: PRICE)
    arms = (
        Arm(name="rate", changes={"optimizer.lr": 0.1}),
        Arm(name="muon", changes={"optimizer.name": "muon"}),
        Arm(name="deep", changes={"model.layers": 8}),
    )
    study = study_of(experiment_of(*arms))
    runs, here = planned(study), Execution(environment={"chip": "test chip"})
    corpora = dict.fromkeys((data_key(run.config) for run in runs), tokens_of())
    every = records_of(study, {"muon": Behaviour(pace=0.5)})
    known = {name: each for name, each in every.items() if name.split("/")[1] != "deep"}
    left = {name: each for name, each in known.items() if not name.endswith("seed-2")}

    def factors(records: Mapping[str, RunRecord], execution: Execution = here) -> dict[str, float]:
        alone = forecast_s(runs, corpora, execution, {})
        found = forecast_s(runs, corpora, execution, records)
        assert found.keys() == alone.keys() - records.keys()
        forked = can_be_forked(runs[0].executed(execution))
        start = forecasts.FORK_S if forked else forecasts.START_S
        return {
            name.split("/")[1]: (each - start) / (alone[name] - start)
            for name, each in found.items()
        }

    # Of a step of 4 sequences; the processor time, which is 0.9 of the wall time.
    plain = STEP_S * 0.9 / (4 * (0.2 + 2 * 0.1))
    said = {"baseline": plain, "rate": plain, "muon": 2 * plain, "deep": 1.5 * plain}
    assert factors(left) == pytest.approx(said)
    for other in (
        Execution(environment={"chip": "another"}),
        here.model_copy(update={"threads": 2}),
    ):
        assert factors(left, other) == pytest.approx(dict.fromkeys(said, 1.0))


def test_steps_that_a_shorter_run_shares_are_not_forecast_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecasts, "price", lambda *_: PRICE)
    schedule = {"name": "wsd", "warmup": 0.0, "warmup_steps": 4, "decay": 0.2}
    rungs = {str(steps): {"budget.steps": steps} for steps in (40, 80)}
    experiment = experiment_of(
        Arm(name="wsd", changes={"schedule": schedule}),
        seeds=(0, 1),
        ladder=Ladder(rungs=rungs, shared=("wsd",)),
    )
    runs = planned(study_of(experiment))
    corpora = dict.fromkeys((data_key(run.config) for run in runs), tokens_of())
    found = forecast_s(runs, corpora, Execution(), {})
    saved = found["optimizers.80/baseline/seed-0"] - found["optimizers.80/wsd/seed-0"]
    # The first step of the decay still has the whole rate.
    assert saved == pytest.approx((0.8 * 40 + 1) * 4 * 0.4)
    assert found["optimizers.40/baseline/seed-0"] == found["optimizers.40/wsd/seed-0"]
