"""Measures of one run against numbers worked out by hand; ``docs/metrics.md`` defines each."""

from __future__ import annotations

import math
import random
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, config_of, known, record_of
from tilelab.study.ask.run import RunSpec
from tilelab.study.records.events import LayerSoftmax, Memory, RunRecord
from tilelab.study.train.session import WARMUP_STEPS
from tilelab.study.verdict import measures
from tilelab.study.verdict.caveats import FIRST_STEPS, SAME_START
from tilelab.study.verdict.measures import (
    MEASURES,
    cost,
    final_metric,
    measure,
    over_seeds,
    reach,
    spike_rate,
    status,
)
from tilelab.study.verdict.result import ArmMeasures, Cost

STEPS, TOKENS = 40, 256  # of the builder's runs: 4 sequences of 64 tokens


def record(seed: int = 0, **behaviour: Any) -> RunRecord:
    return record_of(RunSpec("e", "a", seed, config_of()), Behaviour(**behaviour))


def test_throughput_is_of_the_steps_after_the_warmup() -> None:
    run = record()
    run.steps = [
        replace(each, wall_s=0.1 if each.step % 2 else 0.3, cpu_s=0.4, warmup=each.step <= 2)
        for each in run.steps
    ]
    run.steps[0] = replace(run.steps[0], wall_s=99.0)
    found = measure(run)
    assert run.start.tokens_per_step == TOKENS
    three = config_of(**{"training.accumulation": 3})
    other = record_of(RunSpec("e", "a", 0, three), Behaviour())
    assert other.start.tokens_per_step == 3 * TOKENS
    assert found["tokens_per_s"] == pytest.approx(TOKENS / 0.2)
    assert found["tokens_per_cpu_s"] == pytest.approx(TOKENS / 0.4)
    assert found["step_s"] == pytest.approx(0.2)
    assert (found["step_low_s"], found["step_high_s"]) == (0.1, 0.3)


def test_utilisation_is_operations_over_the_peak_in_both_conventions() -> None:
    run = record()
    run.starts[0] = replace(
        run.start, flops_per_token={"full": 3e6, "causal": 2e6}, peak_flops_s=1e11
    )
    found = measure(run)
    assert found["tokens_per_s"] == pytest.approx(TOKENS / 0.05)
    assert found["mfu_full"] == pytest.approx(3e6 * TOKENS / 0.05 / 1e11)
    assert found["mfu_causal"] == pytest.approx(2e6 * TOKENS / 0.05 / 1e11)
    run.starts.append(replace(run.start, from_step=1, peak_flops_s=2e11))
    assert measure(run)["mfu_full"] == pytest.approx(3e6 * TOKENS / 0.05 / 2e11), "the best peak"


def test_quality_is_that_after_the_last_step() -> None:
    run = record(finals={0: 2.0}, word_perplexity=True)
    found = measure(run)
    loss = 2.0 * math.log(2)
    assert found["bits_per_byte"] == pytest.approx(2.0)
    assert found["loss"] == pytest.approx(loss)
    assert found["perplexity"] == pytest.approx(4.0)
    assert found["word_perplexity"] == pytest.approx(math.exp(4 * loss))
    assert final_metric(run, "loss") == pytest.approx(loss)
    assert final_metric(run, "bits_per_byte") == pytest.approx(2.0)
    assert measure(record(finals={0: 2000.0}))["perplexity"] == math.inf


def test_a_run_under_way_has_speed_and_no_quality() -> None:
    run = record(stopped={0: 25})
    found = measure(run)
    assert found["loss"] is None
    assert found["bits_per_byte"] is None
    assert found["perplexity"] is None
    assert found["tokens_per_s"] is not None
    assert measure(record(stopped={0: 2}))["tokens_per_s"] is None, "still in its warm-up"
    assert status(run, "loss") == "incomplete"
    run = record()
    run.evaluations.pop()
    assert final_metric(run, "loss") is None
    assert status(run, "loss") == "incomplete", "done, and not evaluated"


def test_what_diverged_is_told_from_what_is_missing() -> None:
    run = record(diverged={0: 7})
    assert status(run, "loss") == "diverged"
    assert final_metric(run, "loss") is None
    assert status(RunRecord(), "loss") == "incomplete"
    lost = record()
    lost.evaluations[-1] = replace(lost.evaluations[-1], loss=None, bits_per_byte=None)
    assert status(lost, "bits_per_byte") == "diverged", "done, but its held-out loss is not finite"
    assert status(record(), "loss") == "done"


def test_an_empty_record_has_no_measures() -> None:
    assert measure(RunRecord()) == dict.fromkeys(MEASURES)
    started = RunRecord(starts=record().starts)
    found = measure(started)
    assert found["tokens_per_s"] is None
    assert found["gradient_norm"] is None
    assert found["spike_rate"] is None


def test_gradient_norms_leave_out_what_was_not_finite() -> None:
    run = record(diverged={0: 3})
    assert [each.gradient_norm for each in run.steps] == [2.0, 1.5, None]
    found = measure(run)
    assert found["gradient_norm"] == 1.75
    assert found["gradient_norm_max"] == 2.0


def noisy(count: int, seed: int = 0) -> list[float | None]:
    draw = random.Random(seed)
    return [3.0 + draw.gauss(0, 0.05) for _ in range(count)]


def test_spikes_are_counted_among_the_steps_that_can_be_judged() -> None:
    losses = noisy(108)
    losses[20] = losses[60] = 6.0
    losses[61] = None
    assert spike_rate(losses) == pytest.approx(3 / 100)
    losses[3] = 9.0  # too early to say
    assert spike_rate(losses) == pytest.approx(3 / 100)
    assert spike_rate(losses[:8]) is None


def test_noise_and_falling_losses_are_no_spikes() -> None:
    assert sum(spike_rate(noisy(500, seed)) or 0 for seed in range(20)) * 500 <= 2
    falling = [(each or 0) + 5 * math.exp(-at / 30) for at, each in enumerate(noisy(300, seed=99))]
    assert spike_rate(falling) == 0


def test_a_plateau_after_a_jump_stops_being_one() -> None:
    losses = noisy(50) + [(each or 0) + 2.0 for each in noisy(200, seed=1)]
    rate = spike_rate(losses)
    assert 10 / 242 < known(rate) < 40 / 242, "the window has to move over to the new level"


def test_reach_is_the_first_evaluation_at_or_below_the_target() -> None:
    run = record()
    values = [each.loss for each in run.evaluations]
    assert [each.step for each in run.evaluations] == [0, 10, 20, 30, 40]
    assert values[2] is not None
    found = reach(run, "loss", values[2])
    assert found is not None
    assert found.tokens == 20 * TOKENS
    assert found is run.evaluations[2]
    bits = reach(run, "bits_per_byte", values[2] / math.log(2))
    assert bits == found
    assert reach(run, "loss", 0.1) is None


def test_cost_counts_every_step_of_every_run() -> None:
    whole, broken, partial = record(), record(diverged={0: 7}), record(stopped={0: 12})
    trial = record_of(RunSpec("e", "a", 1000, config_of(), "sweep", 0.1), Behaviour(survives=0.01))
    found = cost([whole, broken, partial, trial, RunRecord()])
    steps = [len(each.steps) for each in (whole, broken, partial, trial)]
    assert steps == [40, 7, 12, 3]
    wall = [0.05 * (count + 3 * 2) for count in steps]  # two steps of the warm-up take fourfold
    expected = Cost(
        runs=4,
        tokens=TOKENS * 62,
        wall_s=sum(wall),
        cpu_s=0.9 * sum(wall),
        sweep_runs=1,
        sweep_tokens=TOKENS * 3,
        sweep_wall_s=wall[3],
        sweep_cpu_s=0.9 * wall[3],
    )
    assert asdict(found) == pytest.approx(asdict(expected))


def test_over_seeds_summarises_every_measure() -> None:
    records = [record(seed, finals={seed: 2.0 + seed}, pace=1.0 + seed) for seed in (0, 1)]
    for seed, run in enumerate(records):
        layers = [LayerSoftmax(0, 3.0, 2.5, 7.0 + seed), LayerSoftmax(1, 2.0, 1.5 + seed, 6.0)]
        run.evaluations = [replace(each, softmaxes=layers) for each in run.evaluations]
    found = over_seeds([measure(each) for each in records])
    assert known(found["bits_per_byte"]).values == pytest.approx((2.0, 3.0))
    assert known(found["tokens_per_s"]).mean == pytest.approx(1.5 * TOKENS / 0.05)
    assert found["word_perplexity"] is None
    assert known(found["max_logit"]).values == (7.0, 8.0)
    assert known(found["entropy_low"]).values == (1.5, 2.5)
    for name in MEASURES:
        if name != "word_perplexity":
            assert found[name] is not None, f"{name}: give the records of records_of.py its data"


def test_memory_is_the_mean_of_the_seeds() -> None:
    records = [record(), record(), RunRecord()]
    records[0].memory, records[1].memory = Memory(1, 2, 3, 4, 10), Memory(1, 2, 3, 6, 20)
    assert over_seeds([measure(each) for each in records]).memory == Memory(1, 2, 3, 5, 15)


PAGE = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
WORDS = " ".join(PAGE.split())


@pytest.mark.parametrize("measure", measures.MEASURES.values(), ids=lambda each: each.name)
def test_every_measure_is_defined(measure: measures.Measure) -> None:
    row = f"| `{measure.name}` | {measure.formula} | {measure.unit} |"
    assert row in PAGE, f"add to a table of docs/metrics.md: {row}"


def test_ratios_memory_and_what_decides_are_defined() -> None:
    names = {each.name for kind in (ArmMeasures, Memory) for each in fields(kind)}
    names |= {"interval", "p_value", "p_holm", "p_equivalence", "p_equivalence_holm"}
    names |= {"more_seeds", "speed_withheld", "cost", "survived", "chosen", "at_edge"}
    assert [name for name in names - {"summaries", "kernels"} if f"`{name}`" not in PAGE] == []


def test_numbers_are_those_of_the_code() -> None:
    assert f"more than {measures.SPIKE_FACTOR:g} robust standard deviations" in WORDS
    assert f"up to {measures.SPIKE_WINDOW} losses before it" in WORDS
    assert f"fewer than {measures.SPIKE_HISTORY} losses before them" in WORDS
    assert f"by more than {SAME_START:.1%}".replace("%", " %") in WORDS
    assert f"over the first {FIRST_STEPS} steps" in WORDS
    assert WARMUP_STEPS == 2
    assert "the first two steps of every process" in WORDS


def test_the_contents_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-")
        for line in PAGE.splitlines()
        if line.startswith("## ")
    }
    links = re.findall(r"\]\(#([a-z0-9-]+)\)", PAGE)
    assert len(links) == len(headings)
    assert set(links) == headings
