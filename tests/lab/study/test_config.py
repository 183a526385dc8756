"""Configs: complete, frozen, hashed, changed by dotted paths, and clear about what does not fit."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tilelab.study.ask.config import (
    Arm,
    Budget,
    Data,
    Experiment,
    Model,
    RunConfig,
    Study,
    Sweep,
    Training,
    Variant,
    change,
    config_hash,
    parse,
)
from tilelab.study.ask.values import Frozen, added, as_invalid_argument, names
from tilelab.study.records.store import read_study
from tilelab.study.tasks.language import LanguageModelling
from tilewise.errors import InvalidArgument

STORED = sorted(Path(__file__).parents[3].glob("benchmarks/studies/*/records.tar.gz"))
LION = Arm(name="lion", changes={"optimizer.name": "lion", "optimizer.lr": 0.001})


def experiment(**values: Any) -> Experiment:
    fields: dict[str, Any] = {
        "name": "first",
        "question": "Which?",
        "baseline": RunConfig(),
        "arms": (LION,),
        "smallest_effect": 0.02,
    }
    return Experiment(**{**fields, **values})


def study(*experiments: Experiment) -> Study:
    return Study(name="s", question="Which?", experiments=experiments or (experiment(),))


def plain(value: Any) -> Any:
    """What is read back from a file."""
    return json.loads(value.model_dump_json())


def test_a_saved_config_says_every_number() -> None:
    values = plain(RunConfig())
    assert values["optimizer"] == {
        "name": "adamw",
        "lr": 0.003,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "embedding_lr_share": 1.0,
        "layer_lr_decay": 1.0,
    }
    assert values["schedule"] == {"name": "linear", "warmup": 0.05, "warmup_steps": 0}
    assert values["attention"]["variant"] == {"name": "causal"}
    assert values["task"] == {"name": "language-modelling"}
    assert (values["model"]["family"], values["model"]["checkpoint"]) == ("gpt2", "")
    assert set(values) == set(RunConfig.model_fields)


@pytest.mark.parametrize("optimizer", names("optimizer"))
@pytest.mark.parametrize("schedule", names("schedule"))
@pytest.mark.parametrize("variant", [name for name in names("variant") if name != "full"])
def test_every_choice_comes_back_from_a_file(optimizer: str, schedule: str, variant: str) -> None:
    config = change(
        RunConfig(),
        {"optimizer": optimizer, "schedule": schedule, "attention.variant": variant},
    )
    again = parse(RunConfig, plain(config))
    assert again == config
    assert config_hash(again) == config_hash(config)
    names_ = (config.optimizer.name, config.schedule.name, config.attention.variant.name)
    assert names_ == (optimizer, schedule, variant)


def test_the_hash_is_of_the_values_and_not_of_how_they_were_written() -> None:
    written = {"name": "adamw", "betas": [0.9, 0.95], "lr": 0.003, "eps": 1e-8, "weight_decay": 0.1}
    assert config_hash(parse(RunConfig, {"optimizer": written})) == config_hash(RunConfig())
    whole, real = (change(RunConfig(), {"optimizer.lr": lr}) for lr in (1, 1.0))
    assert config_hash(whole) == config_hash(real)
    assert len(config_hash(whole)) == 12


def test_hashes_are_those_of_earlier_versions() -> None:
    """Fields that came later count only where they are changed: studies find their folders."""
    assert config_hash(RunConfig()) == "7f1e061bc3b5"
    assert config_hash(change(study(), {"correction": "experiment"})) == "3541d93e5d78"
    assert plain(RunConfig())["model"]["positions"] == "learned"  # files say it all the same


def test_what_is_added_counts_where_it_is_changed() -> None:
    class Part(Frozen):
        old: int = 1
        new: int = added(2, ge=1)

    class Whole(Frozen):
        part: Part = Part()
        parts: tuple[Part, ...] = (Part(), Part(old=3))

    def written(values: dict[str, Any]) -> str:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    before = {"part": {"old": 1}, "parts": [{"old": 1}, {"old": 3}]}
    assert config_hash(Whole()) == written(before)
    changed = Whole(part=Part(new=4), parts=(Part(), Part(old=3, new=2)))
    assert config_hash(changed) == written({**before, "part": {"old": 1, "new": 4}})
    with pytest.raises(ValidationError):
        Part(new=0)


CHANGES: dict[str, Any] = {
    "model.width": 64,
    "model.dropout.attention": 0.1,
    "model.positions": "rotary",
    "model.kv_heads": 2,
    "model.norm": "rms",
    "model.qk_norm": True,
    "model.tied": False,
    "model.bias": False,
    "model.std": 0.08,
    "data.source": "wikitext-2",
    "data.tokenizer": "gpt2",
    "attention.implementation": "plain",
    "attention.variant": {"name": "window", "size": 16},
    "optimizer.betas": [0.9, 0.96],
    "optimizer.embedding_lr_share": 2.0,
    "optimizer.name": "lion",
    "schedule.warmup": 0.06,
    "schedule.warmup_steps": 3,
    "training.precision": "bf16",
    "training.compile": True,
    "budget.tokens": 1000,
    "evaluation.final_stride": 32,
    "evaluation.documents": True,
    "evaluation.attention_windows": 0,
    "data.packing": "padded",
    "training.length_warmup.start": 64,
    "training.length_warmup.steps": 10,
}


def test_lengths_grow_evenly_to_the_context() -> None:
    warm = {"training.length_warmup": {"start": 32, "steps": 7}, "budget.steps": 20}
    config = change(RunConfig(), warm)
    # 32 + 32 k, rounded down to a divisor of 256.
    expected = [32, 64, 64, 128, 128, 128, 128, *[256] * 13]
    assert [config.length_at(step) for step in range(20)] == expected
    assert config.lengths == {32: 1, 64: 2, 128: 4, 256: 13}
    assert RunConfig().lengths == {256: 300}
    assert change(config, {"budget.steps": 2}).lengths == {32: 1, 64: 1}
    other = change(config, {"model.context": 96, "training.length_warmup.start": 12})
    assert other.lengths == {12: 1, 24: 1, 32: 1, 48: 4, 96: 13}
    assert (config.steps, config.tokens_per_step) == (20, RunConfig().tokens_per_step)
    with pytest.raises(InvalidArgument, match=r"length_warmup.start: got 24.*context=256"):
        change(config, {"training.length_warmup.start": 24})


def test_every_change_changes_the_hash() -> None:
    hashes = [config_hash(change(RunConfig(), {path: value})) for path, value in CHANGES.items()]
    assert len({config_hash(RunConfig()), *hashes}) == len(CHANGES) + 1


@pytest.mark.parametrize("archive", STORED, ids=lambda path: path.parent.name)
def test_configs_of_stored_studies_have_the_hashes_of_their_records(archive: Path) -> None:
    found = 0
    with tarfile.open(archive) as packed:
        for member in packed:
            file = packed.extractfile(member)
            if file is None or not member.name.endswith(".jsonl"):
                continue
            for line in file:
                event = json.loads(line)
                if "config_hash" in event:
                    assert config_hash(parse(RunConfig, event["config"])) == event["config_hash"]
                    found += 1
    assert found >= 12


@given(st.permutations([*CHANGES, "optimizer", "optimizer.lr"]))
def test_the_order_of_changes_does_not_matter(order: list[str]) -> None:
    changes = {**CHANGES, "optimizer": "sgd", "optimizer.lr": 0.5}
    shuffled = Arm(name="a", changes={path: changes[path] for path in order})
    config = change(RunConfig(), shuffled.changes)
    assert config == change(RunConfig(), changes)
    assert (config.optimizer.name, config.optimizer.options["lr"]) == ("lion", 0.5)
    assert config_hash(shuffled) == config_hash(Arm(name="a", changes=changes))


def test_a_change_leaves_the_config_and_the_changes_as_they_are() -> None:
    config = RunConfig()
    changes = {**CHANGES, "optimizer": {"lr": 0.5}}
    before = plain(config), json.dumps(changes)
    change(config, changes)
    assert (plain(config), json.dumps(changes)) == before
    for target, field in ((config, "model"), (config.model, "width"), (config.optimizer, "lr")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, field, 3)


_EVERYWHERE = {"embedding_lr_share": 1.0, "layer_lr_decay": 1.0}


def test_a_new_name_keeps_the_options_that_it_has_too() -> None:
    config = change(RunConfig(), {"optimizer.lr": 0.5, "optimizer.name": "lion"})
    kept = {"lr": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.95), **_EVERYWHERE}
    assert config.optimizer.options == kept
    same = change(RunConfig(), {"optimizer.lr": 0.5, "optimizer.name": "adamw"})
    assert same.optimizer.options["lr"] == 0.5


def test_a_whole_choice_has_its_own_standard_values() -> None:
    lion = {"lr": 0.001, "weight_decay": 0.3, "betas": (0.9, 0.99), **_EVERYWHERE}
    for value in ("lion", {"name": "lion"}):
        assert change(RunConfig(), {"optimizer": value}).optimizer.options == lion
    # Without a name it is the standard choice.
    assert change(RunConfig(), {"optimizer": {"lr": 0.5}}).optimizer.name == "adamw"


def test_choices_made_by_hand_are_complete_and_cannot_be_changed() -> None:
    window = Variant(name="window")
    assert window.options == {"size": 256}
    window.options["size"] = 9
    assert window.options == {"size": 256}, "a copy"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optimiser.lr", 1, r"optimiser\.lr: .*optimizer.* Did you mean 'optimizer'\?"),
        ("training.clp", 1, r"training\.clp: .*a key of training: .*Did you mean 'clip'\?"),
        ("model.dropout.atention", 0.1, r"model\.dropout: .*Did you mean 'attention'\?"),
        ("model.width.x", 1, r"model\.width: none, it is a value"),
        ("", 1, "unknown key"),
        ("optimizer.lrr", 1, r"optimizer\.lrr: .*Did you mean 'lr'\?"),
        ("optimizer.momentum", 0.9, r"optimizer\.momentum: got an unknown option"),
        ("optimizer.name", "adam-w", r"optimizer\.name: got 'adam-w'.*Did you mean 'adamw'\?"),
        ("optimizer.name", 3, r"optimizer\.name: got 3"),
        ("optimizer", {"name": ["adamw"]}, r"optimizer\.name"),
        ("optimizer", 3, "optimizer: got 3"),
        ("optimizer.lr", 0, "greater than 0"),
        ("optimizer.lr", float("nan"), "finite"),
        ("optimizer.betas", [0.9], r"betas: got \(0.9,\); required: 2 values, as in \(0.9, 0.95\)"),
        ("optimizer.betas", [0.9, 0.9, 0.9], r"betas: got .*; required: 2 values"),
        ("optimizer.betas", [0.9, 1.0], r"optimizer\.betas\[1\]: got 1.0; required: less than 1"),
        ("attention.variant.name", "windows", r"variant\.name: .*Did you mean 'window'\?"),
        ("attention.implementation", "flash", "'plain', 'sdpa' or 'tilewise'"),
        ("model.heads", 3, r"model\.width: got 128; required: a multiple of heads=3"),
        ("model.context", 1, "greater than or equal to 2"),
        ("model.dropout.residual", 1.0, "less than 1"),
        ("training.batch", 0, r"training\.batch: got 0; required: greater than or equal to 1"),
        ("training.batch", "many", "a valid integer"),
        ("training.clip", float("inf"), "finite"),
        ("training.precision", "int8", "'float32', 'bf16' or 'fp16'"),
        ("budget.steps", None, "budget: got nothing; required: one of steps, tokens"),
        ("budget", {"steps": 1, "tokens": 1}, "budget: got steps and tokens"),
        ("data.held_out", 0.0, "greater than 0"),
        ("data.vocabulary", 512, r"vocabulary: got 512; required: 2048 for tokenizer bytes"),
        ("data", {"tokenizer": "bpe", "vocabulary": 256}, "greater than or equal to 257"),
        ("evaluation", {"evry": 3}, r"evaluation\.evry: .*Did you mean 'every'\?"),
        ("evaluation.final_stride", 257, r"final_stride: got 257.*at most model.context=256"),
        ("model.kv_heads", 3, r"model.kv_heads: got 3.*a divisor of heads=4"),
        ("model", {"positions": "rotary", "width": 12}, r"positions: got rotary.*even head width"),
        (
            "attention",
            {"variant": {"name": "softcap"}, "implementation": "sdpa"},
            r"attention.variant: got softcap.*to tilewise",
        ),
        ("attention.implementation", "x" * 10_000, r"got '?x{1,100}\W.{1,100}$"),
    ],
)
def test_what_does_not_fit_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        change(RunConfig(), {path: value})


def test_steps_take_the_place_of_tokens() -> None:
    config = change(RunConfig(), {"budget.tokens": 5000})
    assert config.budget == Budget(tokens=5000)
    assert change(config, {"budget.steps": 7}).budget == Budget(steps=7)
    with pytest.raises(InvalidArgument, match="budget: got steps and tokens"):
        change(config, {"budget.steps": 7, "budget.tokens": 7})


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (96, 1), (97, 2), (192, 2)])
def test_a_budget_of_tokens_is_rounded_up_to_steps(tokens: int, steps: int) -> None:
    config = RunConfig(
        model=Model(context=16),
        training=Training(batch=2, accumulation=3),
        budget=Budget(tokens=tokens),
    )
    assert config.tokens_per_step == 96
    assert config.steps == steps
    assert change(config, {"budget.steps": 5}).steps == 5


RATES = (0.1, 0.2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arms": (LION, LION)}, "arms: got two called 'lion'"),
        ({"arms": (Arm(name="baseline"),)}, "arms: got two called 'baseline'"),
        ({"seeds": ()}, r"seeds: got \(\)"),
        ({"seeds": (1, 1)}, r"seeds: got \(1, 1\)"),
        ({"arms": (Arm(name="a", changes={"optimizer.rate": 1}),)}, "unknown option"),
        ({"smallest_effect": 0}, "smallest_effect: got 0"),
        ({"target": 0}, "target: got 0"),
        ({"confidence": 1.0}, "less than 1"),
        ({"name": "a/b"}, "name: got 'a/b'"),
        ({"name": ".."}, "name"),
        ({"baseline_name": "a b"}, "baseline_name"),
        ({"sweep": Sweep(values={"lion": RATES})}, "got lion; required: candidates for baseline"),
        (
            {"sweep": Sweep(values={"lion": RATES, "baseline": (0.1,)})},
            "got 1 and 2; required: the same number",
        ),
        ({"sweep": Sweep(values={"lion": (), "baseline": ()})}, "the same number"),
        (
            {"sweep": Sweep(values={"lion": RATES, "baseline": (0.1, 0.10000001)})},
            r"sweep\.values\.baseline: .*six digits",
        ),
        ({"sweep": Sweep(values={"lion": RATES, "baseline": (0.1, -1)})}, "greater than 0"),
        (
            {"sweep": Sweep(path="optimizer.eps", values={"lion": RATES, "baseline": RATES})},
            r"optimizer\.eps",  # Lion has none
        ),
        (
            {"sweep": Sweep(values={"lion": RATES, "baseline": RATES}, seeds=(0,))},
            r"sweep\.seeds: got \(0,\)",
        ),
        ({"sweep": Sweep(values={"lion": RATES, "baseline": RATES}, seeds=())}, "seeds"),
        ({"arm": ()}, "arm: got an unknown key.*Did you mean 'arms'?"),
    ],
)
def test_an_experiment_that_does_not_fit_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        experiment(**values)
    with pytest.raises(InvalidArgument, match=message):
        raise as_invalid_argument(error.value)


@pytest.mark.parametrize("name", ["a/b", "../up", "", "-a", "a b", "a\n", "ä"])
def test_a_name_is_a_safe_folder(name: str) -> None:
    with pytest.raises(ValidationError):
        Arm(name=name)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_changes_are_values_of_json(value: object) -> None:
    with pytest.raises(ValidationError, match="values of JSON"):
        Arm(name="a", changes={"optimizer.lr": value})


def test_experiments_have_names_that_overrides_can_tell_apart() -> None:
    with pytest.raises(ValidationError, match="a name for each experiment"):
        study(experiment(), experiment())
    for taken in ("optimizer", "seeds", "arms", "experiments"):
        with pytest.raises(ValidationError, match="no key of an experiment or a run"):
            study(experiment(name=taken))
    with pytest.raises(ValidationError, match="at least 1 item"):
        Study(name="s", question="q", experiments=())


def test_unknown_keys_deep_in_a_study_suggest_the_nearest() -> None:
    values = plain(study(experiment(sweep=Sweep(values={"lion": RATES, "baseline": RATES}))))
    values["experiments"][0]["baseline"]["model"]["withd"] = 3
    with pytest.raises(InvalidArgument, match=r"0\.baseline\.model\.withd.*Did you mean 'width'"):
        parse(Study, values)
    del values["experiments"][0]["baseline"]["model"]["withd"]
    values["experiments"][0]["sweep"]["paht"] = 3
    with pytest.raises(InvalidArgument, match=r"0\.sweep\.paht.*Did you mean 'path'"):
        parse(Study, values)
    del values["experiments"][0]["sweep"], values["experiments"][0]["question"]
    with pytest.raises(InvalidArgument, match=r"question: got nothing; required: a value"):
        parse(Study, values)
    with pytest.raises(InvalidArgument, match="Data"):
        parse(Data, [])  # type: ignore[arg-type]


STUDIES = sorted((Path(__file__).parents[3] / "benchmarks" / "studies").glob("*/study.json"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_the_hash_of_a_stored_study_is_what_it_was(path: Path) -> None:
    values = json.loads(path.read_text())
    assert len(STUDIES) >= 4
    read = read_study(path.parent).study
    assert config_hash(read) == values["hash"]
    kept = "experiment"  # in a file that lacks the key, which is what it had
    assert read.correction == values["study"].get("correction", kept)
    assert parse(Study, values["study"]).correction == values["study"].get("correction", "study")


class Other(LanguageModelling):
    """A task that knows neither documents nor rows that grow, and of which BERT is a family."""

    packs = False
    families = ("gpt2", "bert")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("changes", "family", "words"),
    [
        ({"data.packing": "documents"}, "gpt2", "task language-modelling"),
        ({"data.packing": "padded"}, "gpt2", "task language-modelling"),
        ({"evaluation.documents": True}, "gpt2", "task language-modelling"),
        ({"training.length_warmup.steps": 10}, "gpt2", "task language-modelling"),
        ({"model.kv_heads": 1}, "bert", "family bert"),
        ({"model.positions": "rotary"}, "bert", "family bert"),
        ({"model.norm": "rms"}, "bert", "family bert"),
        ({"model.qk_norm": True}, "bert", "family bert"),
    ],
)
def test_what_a_task_or_a_family_does_not_know(
    changes: dict[str, Any], family: str, words: str
) -> None:
    config = change(RunConfig(), changes)
    LanguageModelling().check(config)
    model = config.model.model_copy(update={"family": family})
    (path,) = changes
    with pytest.raises(InvalidArgument, match=f"{path}: got .*for {words}"):
        Other().check(config.model_copy(update={"model": model}))
    Other().check(RunConfig())
