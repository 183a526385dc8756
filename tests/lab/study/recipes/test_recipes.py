"""The shipped recipes: what they compare, and that all of it can be made."""

from __future__ import annotations

import json

import pytest

from tests.lab.study.records_of import known
from tilelab.study import recipes
from tilelab.study.ask.config import (
    Dropout,
    Experiment,
    Sequential,
    Study,
    change,
    config_hash,
    parse,
)
from tilelab.study.need import gpu_need, need
from tilelab.study.plan import planned
from tilelab.study.recipes.arms import plain_attention_bytes
from tilelab.study.verdict.detect import check_designs, designs_of, sensitivity
from tilelab.study.verdict.stages import combined
from tilewise.chips import CHIPS
from tilewise.errors import InvalidArgument

STUDIES = {name: recipes.find(name).study() for name in recipes.names()}
ALL = [*STUDIES.values(), recipes.find("wikitext").study(preset="h200")]


def experiments(name: str) -> dict[str, Experiment]:
    return {each.name: each for each in STUDIES[name].experiments}


@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_every_study_can_be_made_and_saved(study: Study) -> None:
    assert config_hash(parse(Study, json.loads(study.model_dump_json()))) == config_hash(study)
    for experiment in study.experiments:
        assert experiment.question.endswith("?")
        # Half an hour of a GPU has no time for more than one of some arms, and says so.
        assert len(experiment.seeds) >= 3 or study.name == "gpu30"
        hashes = [config_hash(experiment.baseline)]
        hashes += [config_hash(experiment.config_of(arm.name)) for arm in experiment.arms]
        assert len(set(hashes)) == len(hashes), "an arm that changes nothing"


@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_arms_are_compared_fairly(study: Study) -> None:
    """They see the same text for as many tokens; those that change the kernel only are systems."""
    for experiment in study.experiments:
        configs = [experiment.baseline]
        configs += [experiment.config_of(arm.name) for arm in experiment.arms]
        assert len({config_hash(each.data) for each in configs}) == 1
        assert len({each.steps * each.tokens_per_step for each in configs}) == 1
        assert len({each.evaluation.windows * each.model.context for each in configs}) == 1
        for arm in experiment.arms:
            kernel_only = set(arm.changes) == {"attention.implementation"}
            rounding_only = arm.changes == {"model.nudge": True}
            assert (arm.kind == "systems") == (kernel_only or rounding_only), arm.name
            assert (arm.kind == "control") == ("attention.fault" in arm.changes), arm.name


@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_held_out_text_chooses_nothing_and_all_of_it_judges(study: Study) -> None:
    for experiment in study.experiments:
        config = experiment.baseline
        if experiment.sweep is not None:
            assert config.data.tuning > 0, experiment.name
            assert config.evaluation.final_stride > 0 or not config.learning.learns_text
        if experiment.alone:
            names = [arm.name for arm in experiment.arms if arm.kind == "control"]
            assert "wrong-scale" in names, experiment.name


def test_kernels_compares_the_three_implementations() -> None:
    only, _ = STUDIES["kernels"].experiments
    assert only.baseline_name == "plain"
    assert only.baseline.attention.implementation == "plain"
    names = ["sdpa", "tilewise", "rounding", "wrong-scale", "wrong-mask"]
    assert [arm.name for arm in only.arms] == names
    for fault in ("scale", "mask"):  # of one seed each
        assert only.config_of(f"wrong-{fault}").attention.fault == fault
        assert only.config_of(f"wrong-{fault}").attention.implementation == "tilewise"
        assert only.seeds_of(f"wrong-{fault}") == only.seeds[:1]
    assert only.config_of("rounding") == change(only.baseline, {"model.nudge": True})
    assert (only.baseline.model.context, only.baseline.steps) == (1024, 20)
    short = recipes.find("kernels").study(context=64, steps=2, seeds=4).experiments[0]
    assert (short.baseline.model.context, short.baseline.steps) == (64, 2)
    assert short.seeds == (0, 1, 2, 3)
    own = recipes.find("kernels").study(text="a/file.txt").experiments
    assert {each.baseline.data.source for each in own} == {"a/file.txt"}


def test_kernels_has_a_context_that_plain_attention_has_no_memory_for() -> None:
    _, long = STUDIES["kernels"].experiments
    assert long.arm_names == ("sdpa", "tilewise", "wrong-scale", "wrong-mask")
    assert long.baseline.model.context == 16384
    plain = change(long.baseline, {"attention.implementation": "plain"})
    assert need(plain).total > 24e9
    assert max(need(long.config_of(arm)).total for arm in long.arm_names) < 3e9
    (only,) = recipes.find("kernels").study(long_context=0).experiments
    assert only.name == "kernels"


def test_laptop_has_two_factors_and_laptop_full_sweeps_their_rates() -> None:
    laptop = experiments("laptop")
    assert list(laptop) == ["kernels", "choices"]
    assert [arm.name for arm in laptop["choices"].arms] == ["muon", "wsd", "muon+wsd"]
    assert all(each.sweep is None for each in laptop.values())
    full = experiments("laptop-full")
    assert {name for name, each in full.items() if each.sweep} == {"optimizers", "schedules"}
    assert [arm.name for arm in full["optimizers"].arms] == ["lion", "muon"]
    assert "cosine" in [arm.name for arm in full["schedules"].arms]
    assert not set(full["together"].seeds) & set(full["optimizers"].seeds)
    assert all(len(each.seeds) == 5 for each in full.values())


def test_wikitext_scores_the_whole_held_out_text() -> None:
    small, real = (
        recipes.find("wikitext").study(preset=preset).experiments[0].baseline
        for preset in ("cpu", "h200")
    )
    assert {small.data.source, real.data.source} == {"wikitext-103"}
    assert small == recipes.find("ladder").study(source="wikitext-103").experiments[1].baseline
    assert small.evaluation.final_stride > 0
    assert real.evaluation.final_stride == 32
    assert (real.model.layers, real.model.width, real.model.context) == (12, 768, 1024)
    assert real.tokens_per_step == 512 * 1024
    with pytest.raises(InvalidArgument, match="'cpu' or 'h200'"):
        recipes.find("wikitext").study(preset="a100")


def test_gpt2_factorial_is_every_combination_with_tuned_rates() -> None:
    (only,) = STUDIES["gpt2-factorial"].experiments
    assert len(only.arms) == 15
    assert only.design is not None
    assert only.design.factors == ("dropout", "decay", "wsd", "muon")
    assert only.design.generators == {}
    all_four = only.config_of("dropout+decay+wsd+muon")
    assert (all_four.optimizer.name, all_four.schedule.name) == ("muon", "wsd")
    assert all_four.optimizer.options["weight_decay"] == 1.0
    assert only.candidates("dropout+muon") == (0.0015, 0.003, 0.006, 0.012)
    runs = planned(STUDIES["gpt2-factorial"])
    # What the recipe says that it costs: in runs of the whole length.
    assert sum(run.phase == "final" for run in runs) == 60
    assert sum(run.config.steps for run in runs) == 124 * only.baseline.steps
    assert not set(known(only.confirm).seeds) & set(only.seeds)


def test_screening_goes_all_the_way_and_says_what_it_costs() -> None:
    (only,) = STUDIES["screening"].experiments
    assert [arm.name for arm in only.arms] == ["muon", "wsd", "rotary", "rms", "qk-norm", "dropout"]
    changed = [path for arm in only.arms for path in arm.changes]
    assert len(set(changed)) == len(changed), "any of them goes with any other"
    assert (known(only.sequential).looks, len(only.seeds)) == ((3, 5), 5)
    assert only.combine is not None
    assert only.confirm is not None
    runs = planned(STUDIES["screening"])
    whole = sum(run.config.steps for run in runs) / only.baseline.steps
    assert whole == 7 * (2 + 5) + 8 * (2 + 3) + 2 * 6 == 101
    assert only.baseline.steps * only.baseline.tokens_per_step == 327_680
    assert (only.baseline.evaluation.every, only.baseline.evaluation.windows) == (160 // 8, 64)
    few = combined(only, ("muon", "wsd", "rms"))
    four = combined(only, ("muon", "wsd", "rms", "qk-norm"))
    assert [len(each.arms) for each in (few, four)] == [7, 7]
    assert known(four.design).generators == {"qk-norm": ("muon", "wsd", "rms")}
    for seeds, looks in ((2, (2,)), (3, (3,)), (4, (3, 4))):
        shorter = recipes.find("screening").study(seeds=seeds).experiments[0]
        assert shorter.sequential == Sequential(looks=looks)


def test_longer_context_stops_plain_attention_where_it_is_told_to() -> None:
    study = recipes.find("longer-context").study(plain_up_to=1024)
    names = [each.name for each in study.experiments]
    reach = [f"reach-{context}" for context in (512, 1024, 2048, 4096, 8192)]
    assert names == ["context", *reach, "spend"]
    for experiment in study.experiments:
        for arm in experiment.arm_names:
            config = experiment.config_of(arm)
            assert config.attention.implementation != "plain" or config.model.context <= 1024
    assert [study.experiments[at].baseline_name for at in (2, 3)] == ["plain", "sdpa"]
    spend = study.experiments[-1]
    assert spend.arm_names == ("plain", "tilewise", "tilewise-batch-4", "wrong-scale")
    wrong = spend.config_of("wrong-scale")
    assert wrong == change(spend.config_of("tilewise"), {"attention.fault": "scale"})
    context = study.experiments[0]
    assert context.config_of("context-8192").model.context == 8192
    for arm in [context.baseline_name, *(each.name for each in context.arms)]:
        config = context.config_of(arm)
        assert config.evaluation.final_stride == config.model.context, "all score all of the text"
    with pytest.raises(InvalidArgument, match="one of 512, 1024"):
        recipes.find("longer-context").study(plain_up_to=1000)


def test_fine_tuning_tunes_every_arm_and_crosses_the_first_data_set() -> None:
    found = experiments("fine-tuning")
    kernels, *tuned = found.values()
    assert kernels.baseline.task.options["dataset"] == "rte", "the longest inputs"
    assert kernels.arm_names[:4] == ("plain", "sdpa", "tilewise", "rounding")
    assert kernels.baseline.model.dropout == Dropout()
    metrics = {each.name: each.metric for each in tuned}
    accuracies = {"rte": "accuracy", "sst2": "accuracy"}
    assert metrics == {"cola": "matthews", **accuracies, "cola-together": "matthews"}
    for each in tuned:
        assert len(each.seeds) >= 5
        assert each.baseline.task.options["dataset"] == each.name.partition("-")[0]
        assert each.baseline.model.checkpoint.startswith("package:")
        assert each.baseline.budget.epochs == (1 if each.name == "sst2" else 3)
        for arm in each.arm_names:
            assert len(each.candidates(arm)) == 3
            assert each.config_of(arm).data.tuning > 0
        assert need(each.baseline).total < 2e9  # two at once on a small machine
    assert found["cola-together"].arm_names[-1] == "lion+wsd+layers"
    check_designs(STUDIES["fine-tuning"])
    # What both experiments on CoLA have is trained once.
    runs = planned(STUDIES["fine-tuning"])
    hashes = [run.config_hash for run in runs if run.seed == 0]
    assert len(hashes) - len(set(hashes)) == 4
    # What the recipe says that it costs: in runs of the whole length.
    whole = sum(
        run.config.steps / each.baseline.steps
        for run in runs
        for each in tuned[:3]
        if run.experiment == each.name
    )
    extra = sum(
        run.config.steps / tuned[3].baseline.steps
        for run in runs
        if run.experiment == "cola-together" and "+" in run.arm
    )
    assert whole + extra == pytest.approx(169, abs=1)
    others = recipes.find("fine-tuning").study(datasets="mrpc, stsb").experiments
    assert [each.metric for each in others[1:3]] == ["f1_accuracy", "pearson_spearman"]
    with pytest.raises(InvalidArgument, match=r"datasets: got 'wnli'.*of cola"):
        recipes.find("fine-tuning").study(datasets="cola,wnli")


def test_h200_is_the_shipped_protocols_at_full_size() -> None:
    study, found = STUDIES["h200"], experiments("h200")
    assert study.chip == "h200"
    # The chip changes no result: a study goes on whatever it says.
    assert config_hash(change(study, {"chip": "a100"})) == config_hash(study)
    lengths = ("1k", "2k", "4k", "8k", "16k")
    sizes = [f"{size}-{length}" for size in ("small", "medium") for length in lengths]
    tuned = ["bert-cola", "bert-rte", "bert-sst2"]
    by_length = [*experiments("listops"), *experiments("long-documents")]
    assert list(found) == [*sizes, "bert-large", "factorial", *tuned, *by_length]
    small, medium = found["small-16k"].baseline.model, found["medium-1k"].baseline.model
    assert (small.layers, small.heads, small.width, small.context) == (12, 12, 768, 16384)
    assert (medium.layers, medium.heads, medium.width, medium.context) == (24, 16, 1024, 1024)
    assert found["medium-2k"].arm_names[:4] == ("plain", "sdpa", "tilewise", "rounding")
    assert found["medium-4k"].arm_names[:3] == ("sdpa", "tilewise", "rounding")
    assert found["factorial"].design == experiments("gpt2-factorial")["factorial"].design
    assert set(experiments("fine-tuning")["cola"].arm_names) == set(found["bert-cola"].arm_names)
    sst2 = found["bert-sst2"].baseline
    assert (sst2.model.layers, sst2.model.width, sst2.steps) == (24, 1024, 6188)
    for each in found.values():
        assert {each.config_of(arm).training.precision for arm in each.arm_names} == {"bf16"}


@pytest.mark.parametrize("name", ["listops", "long-documents"])
def test_h200_has_the_studies_of_length_with_larger_models(name: str) -> None:
    """The same task, lengths and patterns; what differs is the size, and when plain is left out."""
    sizes = {"listops": (6, 8, 512), "long-documents": (12, 12, 768)}
    for each, small in experiments(name).items():
        large = experiments("h200")[each]
        model, same = large.baseline.model, ("family", "context", "dropout", "checkpoint")
        assert (model.layers, model.heads, model.width) == sizes[name]
        assert all(getattr(model, key) == getattr(small.baseline.model, key) for key in same)
        assert large.baseline.task == small.baseline.task
        assert large.baseline.data == small.baseline.data
        assert (large.metric, large.smallest_effect) == (small.metric, small.smallest_effect)
        for arm in ("window-global", "butterfly"):
            patterns = [one.config_of(arm).attention for one in (small, large)]
            assert patterns[0] == patterns[1]
        assert large.baseline.steps * large.baseline.training.batch > 6 * (
            small.baseline.steps * small.baseline.training.batch
        )
    last = {"listops": "lra-2000", "long-documents": "passages-2048"}[name]
    assert experiments("h200")[last].baseline_name == "plain"
    beyond = experiments("h200")["passages-8192"]
    assert beyond.arm_names == ("tilewise", "window-global", "butterfly")
    assert "would hold 2.6e+02 GB and may hold 122" in beyond.question


@pytest.mark.parametrize("name", ["listops", "long-documents"])
def test_plain_attention_is_there_as_long_as_it_fits(name: str) -> None:
    baselines = {}
    for each in experiments(name).values():
        baselines[each.name] = each.baseline_name
        config = each.config_of(each.baseline_name)
        predicted = plain_attention_bytes(config)
        fits = predicted <= 4e9
        assert each.baseline_name == config.attention.implementation
        assert each.baseline_name == ("plain" if fits else "tilewise")
        assert f"{predicted / 1e9:.2g} GB" in each.question
        assert config.attention.variant.name == "full"
        sparse = [arm for arm in each.arms if arm.kind == "training"]
        assert [arm.name for arm in sparse] == ["window-global", "butterfly"]
        for arm in sparse:
            attention = each.config_of(arm.name).attention
            assert (attention.implementation, attention.variant.name) == ("tilewise", arm.name)
        fused = change(config, {"attention.implementation": "tilewise"})
        assert need(fused).total < 2.5e9
    first, *_, last = baselines.values()
    assert (first, last) == ("plain", "tilewise")
    roomy = recipes.find(name).study(plain_gb=100.0)
    assert {each.baseline_name for each in roomy.experiments} == {"plain"}


def test_long_documents_has_options_and_the_bytes_of_the_io_model() -> None:
    apart = recipes.find("long-documents").study(split="presidents", label="party")
    options = apart.experiments[0].baseline.task.options
    assert {each.baseline.tokens_per_step for each in apart.experiments} == {16384}
    assert (options["split"], options["label"]) == ("presidents", "party")
    config = experiments("long-documents")["passages-8192"].baseline
    numbers = 2 * 4 * 8192 * 4  # bytes of two sequences, four heads, float32
    held = 4 * numbers * 8192  # probabilities: kept of two layers, and two more at once
    assert plain_attention_bytes(config) == held + 3 * 4 * numbers * 16  # q, k, v and out
    # Autocast keeps them in float32 all the same, and of each layer a copy of half the size.
    narrow = change(config, {"training.precision": "bf16"})
    assert plain_attention_bytes(narrow) - plain_attention_bytes(config) == numbers * 8192


def test_the_ladder_climbs_from_300_kilobytes_to_30_megabytes() -> None:
    _, length, size = STUDIES["ladder"].experiments
    top = list(length.rungs.values())[-1]
    assert list(length.rungs) == ["0.3MB", "1MB", "3MB", "10MB", "30MB"]
    assert {arm.name for arm in top.arms} - {arm.name for arm in length.rungs["10MB"].arms} == {
        "dropout",
        "decay",
        "smoothing",
    }
    assert list(size.rungs) == ["0.3M", "1M", "3M", "10M"]
    for name, config in ((name, rung.baseline) for name, rung in size.rungs.items()):
        vocabulary = 2 * config.data.vocabulary * config.model.width
        parameters = vocabulary + 12 * config.model.layers * config.model.width**2
        assert parameters == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.1)
        assert config.model.std**2 * config.model.width == pytest.approx(0.08**2 * 128, rel=0.02)
    tried = [size.rungs[name].candidates("adamw+wsd") for name in ("0.3M", "10M")]
    assert max(tried[1]) < max(tried[0])
    shorter = recipes.find("ladder").study(longest=3.0).experiments[1]
    assert list(shorter.rungs) == ["0.3MB", "1MB", "3MB"]
    with pytest.raises(InvalidArgument, match="one of 3, 10, 30"):
        recipes.find("ladder").study(longest=5.0)


@pytest.mark.parametrize("name", ["ladder", "laptop", "wikitext"])
def test_a_design_detects_what_its_stored_spread_lets_it(name: str) -> None:
    check_designs(STUDIES[name])
    for each, family in designs_of(STUDIES[name]):
        planned = sensitivity(each, family, [known(each.spread)], pooled=each.error == "pooled")
        assert known(planned.detectable) <= each.smallest_effect * (1 + 1e-5)
        if not each.alone:
            assert known(planned.detectable) > 0.8 * each.smallest_effect, "a finer one would do"


def test_ladders_have_the_spreads_of_their_own_text() -> None:
    for longest in (3.0, 10.0):
        check_designs(recipes.find("ladder").study(longest=longest))
    known_text, other = (
        recipes.find("ladder").study(source=source) for source in ("stdlib", "a/file.txt")
    )
    assert {each.spread for each, _ in designs_of(other)} == {None}
    precision, length, size = known_text.experiments
    assert (len(precision.seeds), len(length.seeds), len(size.seeds)) == (7, 3, 5)
    smallest = [each.smallest_effect for each in length.rungs.values()]
    assert smallest == sorted(smallest, reverse=True), "long runs tell smaller effects apart"


def test_gpu30_fits_its_chip_and_trains_seven_runs() -> None:
    study = STUDIES["gpu30"]
    memory = known(CHIPS["h100"].memory_bytes)
    runs = planned(study)
    assert max(gpu_need(run.config).total for run in runs) < 0.8 * memory
    for experiment in study.experiments[:2]:
        assert {"plain", "sdpa", "tilewise"} <= set(experiment.arm_names)
        twice = {"training.batch": 2 * experiment.baseline.training.batch}
        assert gpu_need(change(experiment.baseline, twice)).total > 0.75 * memory, "it had room"
        assert experiment.baseline.tokens_per_step == 32_768
        assert "wrong-scale" in experiment.arm_names
    exact = study.experiments[2]
    assert exact.baseline.training.precision == "float32", "which a wrong scale shows in"
    assert exact.arm_names == ("plain", "sdpa", "tilewise", "rounding", "wrong-scale")
    assert [each.seeds for each in study.experiments[:3]] == [(0, 1, 2), (0, 1, 2), (0,)]
    learnt = [run for run in runs if run.experiment in ("noise", "choices")]
    own = {(run.config_hash, run.seed): run for run in learnt}
    assert len(own) == 7
    for run in own.values():
        assert run.config.steps * run.config.tokens_per_step == pytest.approx(4e7, rel=0.01)
        assert run.config.training.compile
        assert run.config.data.vocabulary % 64 == 0
    graphs = {run.config.model.model_dump_json() for run in own.values()}
    assert len(graphs) == 2
    assert learnt[-1].config.model.dropout.residual > 0, "the other graph comes last"
    check_designs(study)
    noise, choices = study.experiments[3:]
    assert (noise.name, noise.seeds, choices.seeds, choices.error) == ("noise", (0, 1), (0,), "own")
    (paired,) = recipes.find("gpu30").study(seeds=2, tiny=True).experiments[3:]
    assert (paired.name, paired.seeds, paired.error) == ("choices", (0, 1), "pooled")
    tested = recipes.find("gpu30").study(seeds=3, tokens=15_000_000)
    check_designs(tested)
    shorter = [run for run in planned(tested) if run.experiment == "choices"]
    assert len(shorter) == 18
    assert sum(run.config.steps for run in shorter) < 7 * learnt[0].config.steps
