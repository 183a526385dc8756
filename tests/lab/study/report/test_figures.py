"""Figures: what lines average and leave out, Kaplan-Meier, the front, attention by layer, SVG."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    folder_of,
    judged,
    known,
    records_of,
    study_of,
)
from tilelab.common.svg import (
    ARM_COLOURS,
    SOFT,
    arm_colour,
    arm_dashes,
    canvas,
    finish,
    place,
    short_name,
    spread,
)
from tilelab.study.ask.config import Arm
from tilelab.study.recipes import find
from tilelab.study.records.events import LayerSoftmax, Memory, RunRecord
from tilelab.study.report import gather, write
from tilelab.study.report.costs import (
    Point,
    drawn_parts,
    front,
    kaplan_meier,
    pareto_chart,
    pareto_table,
    parts_of,
)
from tilelab.study.report.lines import Series, curve, difference, enough, layers_of, loss_chart
from tilelab.study.report.page import Chart
from tilelab.study.report.verdicts import effect_words
from tilelab.study.verdict.measures import measure, over_seeds
from tilelab.study.verdict.result import FloorResult


def _arms(**behaviours: Behaviour) -> dict[str, dict[int, RunRecord]]:
    """Arm -> seed -> record, of an experiment with the arm ``lion``."""
    records = records_of(study_of(experiment_of("lion")), behaviours)
    return {
        arm: {
            seed: record
            for seed in (0, 1, 2)
            if (record := records.get(f"optimizers/{arm}/seed-{seed}")) is not None
        }
        for arm in ("baseline", "lion")
    }


def test_a_curve_is_the_mean_and_the_outermost_seeds() -> None:
    finals = {0: 2.0, 1: 2.3, 2: 2.9}
    runs = _arms(lion=Behaviour(finals=finals))["lion"]
    found = curve("lion", 1, runs, "bits_per_byte", "tokens")
    assert found.x == (0.0, 2560.0, 5120.0, 7680.0, 10240.0)
    assert (found.mean[-1], found.low[-1], found.high[-1]) == pytest.approx((2.4, 2.0, 2.9))
    assert (found.seeds, found.broken, found.place) == (3, False, 1)
    by_loss = curve("lion", 1, runs, "loss", "time")
    assert by_loss.mean[-1] == pytest.approx(2.4 * 0.6931472)
    assert by_loss.x[-1] == pytest.approx(0.05 * (40 + 6))  # the first steps are slower


def test_a_difference_is_paired_by_seed() -> None:
    arms = _arms(
        lion=Behaviour(finals={0: 2.0, 1: 2.3, 2: 2.9}),
        baseline=Behaviour(finals={0: 2.1, 1: 2.5, 2: 2.8}),
    )
    found = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    ends = (found.mean[-1], found.low[-1], found.high[-1])
    assert ends == pytest.approx((-0.2 / 3, -0.2, 0.1))
    assert found.mean[0] == pytest.approx(0.0, abs=1e-12)  # the same weights


def test_runs_that_are_behind_do_not_cut_the_line_off() -> None:
    arms = _arms(lion=Behaviour(stopped={0: 12, 1: 0}))
    found = curve("lion", 1, arms["lion"], "bits_per_byte", "tokens")
    assert (found.x[-1], found.seeds) == (10240.0, 1)
    pair = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    assert (pair.x[-1], pair.seeds) == (10240.0, 1)
    begun = _arms(lion=Behaviour(stopped={0: 12, 1: 25, 2: 25}))["lion"]
    found = curve("lion", 1, begun, "bits_per_byte", "tokens")
    assert (found.x[-1], found.seeds) == (5120.0, 2)
    assert curve("lion", 1, {}, "loss", "time").x == ()
    assert curve("lion", 1, {0: RunRecord()}, "loss", "time").x == ()
    assert difference("lion", 1, {}, _arms()["baseline"], "loss").x == ()


def test_a_run_that_diverged_is_never_left_out() -> None:
    arms = _arms(lion=Behaviour(diverged={1: 22}))
    found = curve("lion", 1, arms["lion"], "bits_per_byte", "tokens")
    assert (found.x[-1], found.seeds, found.broken) == (5120.0, 3, True)
    pair = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    assert (pair.x[-1], pair.seeds, pair.broken) == (5120.0, 3, True)


def test_arms_of_other_tokens_a_step_are_compared_at_the_same_steps() -> None:
    arms = _arms(
        lion=Behaviour(finals={0: 2.0, 1: 2.3, 2: 2.9}),
        baseline=Behaviour(finals={0: 2.1, 1: 2.5, 2: 2.8}),
    )
    same = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    for seed, record in arms["lion"].items():  # it pads, and no seed as much as another
        record.evaluations = [
            replace(each, tokens=each.tokens * (7 - seed) // 10) for each in record.evaluations
        ]
    found = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    assert (found.mean, found.low, found.seeds) == (same.mean, same.low, 3)
    assert found.x == pytest.approx([0.6 * each for each in same.x], abs=1)


@pytest.mark.parametrize("loss", [5.5, 0.0])
def test_losses_that_are_all_one_number_have_a_frame(loss: float) -> None:
    same = (loss, loss)
    series = Series("baseline", 0, (0.0, 10.0), same, same, same, 1, broken=False)
    assert loss_chart([series], "tokens", "bits_per_byte", "curve") is not None


def test_a_floor_is_drawn_where_the_frame_need_not_grow_much_for_it() -> None:
    falls = (4.0, 3.0)
    drawn = [Series("baseline", 0, (0.0, 10.0), falls, falls, falls, 1, broken=False)]

    def chart(value: float, metric: str = "bits_per_byte") -> Chart:
        floor = FloorResult("byte table", "seen", 9, value, metric, decides=True, beaten_by=())
        return known(loss_chart(drawn, "tokens", "bits_per_byte", "curve", floor))

    plain = known(loss_chart(drawn, "tokens", "bits_per_byte", "curve"))
    dashes = "stroke-dasharray"
    assert dashes in chart(2.6).svg
    assert dashes not in plain.svg + chart(0.5).svg
    assert chart(2.6).caption.endswith(" Dashed: the byte table (2.600).")
    assert chart(0.5).caption.endswith(" Outside of the frame: the byte table (0.500).")
    assert chart(2.6, "accuracy") == plain


def test_the_names_of_sixteen_arms_do_not_touch() -> None:
    ends = (1.0, 1.001, 1.002)  # all at one height
    drawn = [
        Series(f"arm-{place}", place, (0.0, 10.0), *((5.0, ends[place % 3]),) * 3, 1, False)
        for place in range(16)
    ]
    chart = loss_chart(drawn, "tokens", "bits_per_byte", "curve")
    names = re.findall(r'<text[^>]*y="([\d.]+)"[^>]*>arm-\d+<', known(chart).svg)
    heights = sorted(map(float, names))
    assert len(heights) == 16
    assert min(b - a for a, b in pairwise(heights)) > 18.5  # a line is 16


def test_the_share_that_is_left_by_hand() -> None:
    """Of five runs two reach it at 2, one ends at 3, and the last two reach it at 4 and 5."""
    found = kaplan_meier([2, 2, 4, 5], [3], 0.9)
    assert found.at == (2, 4, 5)
    assert found.share == pytest.approx((3 / 5, 3 / 5 / 2, 0))
    first, second, last = found.intervals
    assert last is None
    variance = 2 / (5 * 3)
    for interval, share in ((first, 0.6), (second, 0.3)):
        half = 1.6448536 * math.sqrt(variance) / abs(math.log(share))
        ends = (share ** math.exp(half), share ** math.exp(-half))
        assert (known(interval).low, known(interval).high) == pytest.approx(ends)
        variance += 1 / (2 * 1)


def test_a_miss_is_censored_at_its_budget_and_so_is_a_run_that_diverged() -> None:
    assert kaplan_meier([2, 4, 4], [3, 5], 0.95).median == 4
    nobody = kaplan_meier([], [5, 5], 0.95)
    assert (nobody.at, nobody.median, nobody.censored) == ((), None, (5, 5))
    behaviours = {"late": Behaviour(effect=1.0), "hot": Behaviour(diverged={1: 3})}
    late, hot = judged(experiment_of("late", "hot", target=2.5), behaviours).arms
    assert known(late.target).censored == (40 * 256,) * 3
    assert hot.target is not None
    assert (hot.target.reached, hot.target.censored) == (2, (40 * 256,))


def test_a_run_of_epochs_that_diverged_is_censored_at_all_of_them() -> None:
    every = [each.baseline for each in find("fine-tuning").study().experiments]
    baseline = next(each for each in every if each.budget.epochs)
    experiment = experiment_of("hot", baseline=baseline, target=2.5, metric="cross_entropy")
    (hot,) = judged(experiment, {"hot": Behaviour(diverged={1: 3})}).arms
    assert known(hot.target).censored == (baseline.steps * baseline.tokens_per_step,) * 3


def test_the_front_is_what_nothing_beats_in_both() -> None:
    rows = {"cheap": (1, 5), "dear": (9, 1), "middle": (4, 3), "beaten": (5, 3), "equal": (4, 4)}
    points = [
        Point(name, at, float(cost), float(rank), float(rank))
        for at, (name, (cost, rank)) in enumerate(rows.items())
    ]
    best = [each.arm for each in front(points)]
    assert best == ["cheap", "middle", "dear"]
    for each in points:
        beaten = any(
            one.cost <= each.cost and one.rank <= each.rank and one != each for one in points
        )
        assert (each.arm in best) == (not beaten)
    assert [each.arm for each in front(points, smallest=2.0)] == ["cheap", "middle", "dear"]
    assert [each.arm for each in front(points, smallest=2.1)] == ["cheap", "dear"]


def test_no_front_is_drawn_through_differences_that_do_not_matter() -> None:
    apart = judged(experiment_of("near", "far"), {"far": Behaviour(effect=-0.1, pace=0.5)})
    table = known(pareto_table(apart))
    said = {row[0].text: row[-1].text for row in table.rows}
    assert said["far"] == "on the front"
    assert (said["near"] == "on the front") != (said["baseline"] == "on the front")
    level = judged(experiment_of("near"), {"near": Behaviour(effect=-0.001, pace=0.5, noise=0)})
    assert pareto_table(level) is None
    assert pareto_chart(level, "front") is None


@pytest.mark.parametrize("peak", [100.0, 40.0])
def test_bars_of_memory_add_up_to_the_peak(peak: float) -> None:
    split = Memory(10.0, 10.0, 10.0, 20.0, peak)
    assert sum(drawn_parts(split)) == peak
    assert parts_of(split)["activations"] == 20.0


def test_three_points_are_no_curve() -> None:
    def series(count: int) -> Series:
        line = tuple(map(float, range(count)))
        return Series("lion", 1, line, line, line, line, 1, broken=False)

    assert enough([series(3), series(2)]) == []
    assert enough([series(4), series(2)]) == [series(4), series(2)]


def test_what_an_effect_in_bits_means() -> None:
    better, worse = judged(
        experiment_of("better", "worse"),
        {
            "baseline": Behaviour(finals=dict.fromkeys((0, 1, 2), 2.0)),
            "better": Behaviour(finals={0: 1.9, 1: 1.8999, 2: 1.9001}),
            "worse": Behaviour(finals={0: 3.0, 1: 2.9999, 2: 3.0001}),
        },
    ).arms
    found = judged(experiment_of(), {"baseline": Behaviour(finals=dict.fromkeys((0, 1, 2), 2.0))})
    assert effect_words(better, found) == (
        "0.100 bits per byte (5 % fewer bits, each byte of text 7.2 % more probable)"
    )
    assert "50 % more bits, each byte of text 50 % less probable" in effect_words(worse, found)


EVIL = "<script>&\"'"


def _drawn(name: str) -> str:
    figure = canvas(300, 200)
    axes = place(figure, 40, 40, 20, 10)
    axes.plot([0, 1], [2, 3], color=arm_colour(1), marker="o")
    axes.fill_between([0, 1], [1, 2], [3, 4], color=arm_colour(2), alpha=0.2)
    axes.text(0.5, 2.5, EVIL, color=SOFT, weight="bold", parse_math=False)
    return str(finish(figure, name, EVIL))


def test_a_figure_is_the_pages() -> None:
    svg = _drawn("one")
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert 'viewBox="0 0 300 200"' in svg
    assert not re.search(r'<svg[^>]* (?:width|height)="', svg)
    assert "var(--arm-1)" in svg
    assert "var(--arm-2)" in svg
    assert not re.search(r"#[0-9a-f]{6}", svg)  # no colour that the page does not decide
    assert "<style" not in svg  # matplotlib's own would hold for the whole page
    assert "font:" not in svg
    assert 'class="strong"' in svg
    assert "&lt;script&gt;&amp;" in svg
    assert "<script" not in svg


def test_ids_do_not_meet() -> None:
    first, second = _drawn("one"), _drawn("two")
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', first))
    assert used == ids[0]
    assert _drawn("one") == first, "the same each time"


def test_colours_come_round_again_dashed() -> None:
    assert len({arm_colour(index) for index in range(ARM_COLOURS)}) == ARM_COLOURS
    assert arm_colour(ARM_COLOURS) == arm_colour(1)  # never the baseline's
    assert arm_dashes(ARM_COLOURS - 1) == "solid"
    looks = [(arm_colour(index), arm_dashes(index)) for index in range(3 * ARM_COLOURS - 2)]
    assert len(set(looks)) == len(looks)  # of 22 arms; a factorial of four factors has 16


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=12), st.floats(0.1, 2))
def test_labels_keep_their_order_and_the_frame(wanted: list[float], gap: float) -> None:
    assert spread([1.0, 5.0], 1.0, 0.0, 6.0) == [1.0, 5.0]
    assert spread([3.0, 3.0], 1.0, 0.0, 6.0) == [2.5, 3.5]
    assert spread([0.5, 0.5, 0.5], 1.0, 0.0, 1.0) == [0.0, 0.5, 1.0]  # closer where it must be
    assert spread([], 1.0, 0.0, 1.0) == []
    places = spread(wanted, gap, 0.0, 10.0)
    least = min(gap, 10.0 / max(len(wanted) - 1, 1))
    ordered = sorted(places)
    assert all(after - before >= least - 1e-6 for before, after in pairwise(ordered))
    assert all(-1e-6 <= at <= 10 + 1e-6 for at in places)
    for one, first in zip(places, wanted, strict=True):
        for other, second in zip(places, wanted, strict=True):
            assert not (first < second and one > other + 1e-6)


STUDY = study_of(
    experiment_of(
        Arm(name="qk-norm", changes={"model.qk_norm": True}),
        Arm(name="plain", changes={"attention.implementation": "plain"}, kind="systems"),
        baseline=config_of(**{"model.layers": 2}),
    )
)


def _seen(step: int, growth: float) -> list[LayerSoftmax]:
    """Two layers; logits grow by the step, and the second layer's lowest head collapses."""
    fallen = max(3.0 - growth * step / 20, 0.01)
    return [
        LayerSoftmax(0, 3.0, 2.5, 1.0 + growth * step),
        LayerSoftmax(1, 2.0, fallen, 0.5 + growth * step),
    ]


def _records(growths: dict[str, float]) -> dict[str, RunRecord]:
    """The records of the study, with statistics in these arms."""
    records = records_of(STUDY)
    for record in records.values():
        growth = growths.get(record.start.arm)
        if growth is not None:
            record.evaluations = [
                replace(each, softmaxes=_seen(each.step, growth + 0.01 * record.start.seed))
                for each in record.evaluations
            ]
    return records


def _of(records: dict[str, RunRecord], arm: str) -> dict[int, RunRecord]:
    return {each.start.seed: each for each in records.values() if each.start.arm == arm}


def test_layers_are_means_over_the_seeds() -> None:
    found = layers_of("baseline", 0, _of(_records({"baseline": 1.0}), "baseline"))
    assert found is not None
    assert found.x == (0.0, 2560.0, 5120.0, 7680.0, 10240.0)
    assert found.logits[0] == pytest.approx((1.0, 11.1, 21.2, 31.3, 41.4))
    assert found.entropy == ((3.0,) * 5, (2.0,) * 5)
    assert found.lowest_head[1][-1] == pytest.approx(3 - 40 * 1.01 / 20)


def test_the_measures_of_a_run_are_the_outermost() -> None:
    records = _records({"baseline": 1.0})
    one = measure(records["optimizers/baseline/seed-0"])
    assert (one["max_logit"], one["entropy"]) == (41.0, 2.5)
    assert one["entropy_low"] == pytest.approx(1.0)
    of_seeds = over_seeds([measure(each) for each in _of(records, "baseline").values()])
    assert known(of_seeds["max_logit"]).values == pytest.approx((41.0, 41.4, 41.8))
    nothing = measure(records["optimizers/plain/seed-0"])
    assert (nothing["max_logit"], nothing["entropy"], nothing["entropy_low"]) == (None, None, None)
    # What is not finite is left out.
    runs = _of(records, "baseline")
    last = runs[1].evaluations[-1]
    gone = [replace(each, max_logit=None) for each in last.softmaxes or []]
    runs[1].evaluations[-1] = replace(last, softmaxes=gone)
    found = layers_of("baseline", 0, runs)
    assert known(found).x[-1] == 7680.0
    assert measure(runs[1])["max_logit"] == pytest.approx(1.0 + 1.01 * 30)
    assert layers_of("plain", 2, {}) is None


def test_the_report_shows_them_and_says_who_has_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, STUDY, _records({"baseline": 1.0, "qk-norm": 0.1}))
    page, twin = write(gather(folder))
    text = twin.read_text("utf-8")
    assert "Largest attention logit" in page.read_text("utf-8")
    assert "| layer 1 | 2.00 (lowest head 0.98, logits up to 40.90) | 2.00 (" in text
    assert "| largest logit of the run | 41.40 (± 0.40) | 5.40 (± 0.40) |" in text
    assert "Nothing of plain: only tilewise's kernels keep statistics" in text
    _, twin = write(gather(folder_of(tmp_path / "none", STUDY, _records({}))))
    assert "Attention by layer" not in twin.read_text("utf-8")


def test_names_of_arms_in_figures_stay_apart() -> None:
    factors = ("dropout", "decay", "wsd", "muon")
    names = ["+".join(on) for size in range(1, 5) for on in combinations(factors, size)]
    short = {name: short_name(name, 15) for name in names}
    assert len(set(short.values())) == len(names)
    assert all(len(each) <= 15 for each in short.values())
    assert short["dropout+decay"] == "dropout+decay"
    assert short["dropout+decay+wsd+muon"] == "dro+dec+wsd+muo"
    assert short["dropout+wsd+muon"] == "dropou+wsd+muon"
    assert short_name("a-name-without-factors", 15) == "a-name-without\N{HORIZONTAL ELLIPSIS}"
