"""The report as a whole: complete, escaped, self-contained, and honest about what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from tests.lab.pages import Page
from tests.lab.study.records_of import (
    COMMAND,
    Behaviour,
    config_of,
    experiment_of,
    folder_of,
    known,
    records_of,
    study_of,
)
from tests.lab.study.report.samples import EVIL, choose, kernels_experiment, rich_study
from tests.lab.study.tasks import test_images as images
from tilelab.study import report
from tilelab.study.ask.config import Arm, Sequential, Study, Sweep
from tilelab.study.records.events import Sample, Step
from tilelab.study.report import gather, write
from tilelab.study.report.page import NONE
from tilelab.study.report.tables import evidence_tables
from tilelab.study.verdict.judge import judge
from tilewise.errors import InvalidArgument

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


def _written(folder: Path) -> tuple[Page, str, str]:
    """The page read, its source, and the Markdown twin."""
    evidence = gather(folder)
    page, twin = write(evidence)
    assert json.loads((folder / "verdict.json").read_text()) == evidence.verdict.as_json()
    source = page.read_text("utf-8")
    reader = Page(source)
    reader.text = re.sub(r"\s+", " ", reader.text)
    return reader, source, twin.read_text("utf-8")


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str, str]:
    study, records = rich_study()
    return _written(folder_of(tmp_path_factory.mktemp("rich"), study, records))


def _study(*arms: str | Arm, **fields: object) -> Study:
    return study_of(experiment_of(*arms, **fields))


def test_both_say_what_was_found(rich: tuple[Page, str, str]) -> None:
    reader, _, twin = rich
    twin = twin.replace("\\", "")
    for said in (
        "Which training choices, on top of efficient attention, are worth having?",
        f"against plain, sdpa is 1.60{TIMES} faster and tilewise is 2.40{TIMES} faster",
        "lion+wsd is better by 0.156 bits per byte",
        "dropout is worse by 0.091 bits per byte",
        "z-loss changed nothing that matters",
        "noclip is undecided",
        "Neither a difference nor its absence is shown.",
        "Shown to be smaller than 0.01, the smallest effect that matters",
        "hot diverged",
        "schedule.name = wsd",
        f"{MINUS}0.108",
        f"[{MINUS}0.112, {MINUS}0.103]",
        "The arm did not ask for that",
        "Tokens to 2 nats per token",
        "Sweep of optimizer.lr",
        "sdpa flash (cpu)",
        "14.1 MB",
        "2.6 s",
        "5,120",
        "95 % interval",
        "2.13.0",
        "a chip",
        COMMAND,
        "0000000000",
        "docs/metrics.md",
    ):
        assert said in reader.text, said
        assert said in twin, said


def test_the_verdicts_come_first(rich: tuple[Page, str, str]) -> None:
    reader, source, twin = rich
    assert source.count('class="verdicts"') == 3
    assert source.rindex('class="verdicts"') < source.index("<figure")
    assert twin.index("## Verdicts") < twin.index("## Evidence") < twin.index("## Repeat it")
    assert reader.text.index("What does attention") < reader.text.index("Loss by tokens")


def test_every_arm_has_its_verdict_and_its_interval(rich: tuple[Page, str, str]) -> None:
    _, source, _ = rich
    assert source.count('class="arm base"') == 3
    assert source.count('class="arm"') == 10
    assert source.count('class="forest ') == 9  # one arm diverged before two pairs: no effect
    labels = re.findall(r'class="forest \w+"[^>]*aria-label="([^"]+)"', source)
    assert f"lion: {MINUS}0.059 bits per byte, 95 % interval [{MINUS}0.065, {MINUS}0.052]" in labels
    # The kernel flag: an alarm where the arm did not ask for another kernel, a word where it did.
    assert source.count('class="flag alarm"') == 1
    assert source.count('class="flag"') == 2


def test_the_page_loads_nothing(rich: tuple[Page, str, str]) -> None:
    reader, source, _ = rich
    assert not {"script", "img", "iframe", "object"} & set(reader.tags)
    assert all(link.startswith(("#", "data:,")) or link == "" for link in reader.links)
    without = source.replace("http://www.w3.org/2000/svg", "").replace(
        "http://www.w3.org/1999/xlink", ""
    )
    assert not re.search(r"https?:|@import|url\((?!#)", without)


def test_figures_and_ids(rich: tuple[Page, str, str]) -> None:
    reader, source, _ = rich
    assert reader.tags.count("figure") == source.count('role="img" aria-label="') - 9 == 21
    ids = re.findall(r' id="([^"]+)"', source)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'(?:url\(#|href="#)([^)"]+)', source)
    assert set(targets) <= set(ids)


def test_the_config_marks_what_an_arm_changes(rich: tuple[Page, str, str]) -> None:
    reader, _, twin = rich
    assert "optimizer.lr 0.003 lion: 0.0003; hot: 0.1" in reader.text
    assert "| optimizer.lr | 0.003 | lion: 0.0003; hot: 0.1 |" in twin.replace("\\", "")
    assert (
        "optimizer.lr 0.001 muon: 0.01" in reader.text
    )  # what the sweep chose, not what it began with
    assert "optimizer.lr = 0.01 by its sweep" in reader.text


def test_it_is_made_from_config_and_records_alone(
    tmp_path: Path, rich: tuple[Page, str, str]
) -> None:
    study, records = rich_study()
    folder = folder_of(tmp_path / "copy", study, records)
    (folder / "report.html").write_text("something else")
    (folder / "index.sqlite").write_bytes(b"no database")
    _, source, twin = _written(folder)
    assert (source, twin) == rich[1:]
    assert json.loads((folder / "study.json").read_text())["hash"] in source
    assert not list(folder.glob(".report*"))  # nothing temporary is left


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    study = _study("lion", question=EVIL).model_copy(update={"question": EVIL})
    records = records_of(study, {"lion": Behaviour(kernels=(EVIL,), effect=-0.1)})
    for name, record in records.items():
        record.starts = [
            replace(start, corpus={"name": EVIL, EVIL: 1}, environment={EVIL: EVIL})
            for start in record.starts
        ]
        if name.endswith("lion/seed-1"):
            assert record.end is not None
            record.end = replace(record.end, status="diverged", reason=EVIL)
        record.sample = Sample(EVIL, EVIL)
    told = {"environment": {EVIL: EVIL, "chip": EVIL}, "began": EVIL}
    folder = folder_of(tmp_path / "one", study, records, command=EVIL, **told)
    reader, source, twin = _written(folder)
    assert not {"script", "img"} & set(reader.tags)
    assert "\u202e" not in source + twin  # turns the direction of what follows
    shown = EVIL.replace("\u202e", "\N{REPLACEMENT CHARACTER}")
    assert reader.text.count(shown) >= 9  # titles, question, kernels, command, facts
    outside = re.sub(r"^(`{3,}).*?^\1", "", twin, flags=re.S | re.M)  # but for the command's block
    assert "<script" in twin
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)\[a", outside)
    # No text adds a cell: the rows of a table have the bars of the line below its head.
    for is_table, rows in groupby(outside.splitlines(), lambda line: line.startswith("|")):
        bars = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(bars) == 1 or not is_table
    # Nor can a fence be closed from within.
    folder = folder_of(tmp_path / "two", study, records, command="run\n````\n# owned", **told)
    _, _, twin = _written(folder)
    assert "`````\nrun\n````\n# owned\n`````" in twin


PARTIAL = {
    "lion": Behaviour(stopped={0: 25, 1: 0}, absent=(2,)),
    "baseline": Behaviour(stopped={2: 12}),
}


def test_a_partial_study_says_what_is_missing(tmp_path: Path) -> None:
    study = _study("lion", "wsd", target=2.6)
    folder = folder_of(tmp_path, study, records_of(study, PARTIAL))
    record = folder / "runs/optimizers/wsd/seed-1/record.jsonl"
    record.write_text("{}\n" + record.read_text())
    reader, source, twin = _written(folder)
    for text in (reader.text, twin.replace("\\", "")):
        assert "This study is not finished: 4 of 9 runs are over." in text
        assert "optimizers/wsd/seed-1: its record is damaged and left out" in text
        assert "optimizers/wsd/seed-0: its record" not in text
        assert "optimizers/lion/seed-0: 25 steps done" in text
        assert "optimizers/lion/seed-1: not begun" in text
        assert "optimizers/lion/seed-2: not begun" in text
        assert "optimizers/baseline/seed-2: 12 steps done" in text
        assert "not finished" in text
    assert "<figure" in source


def test_speed_is_withheld_until_the_losses_are_equal(tmp_path: Path) -> None:
    study = study_of(kernels_experiment())
    behaviours = {"tilewise": Behaviour(effect=0.5, pace=77.7), "sdpa": Behaviour(noise=1e-7)}
    reader, source, twin = _written(folder_of(tmp_path, study, records_of(study, behaviours)))
    assert re.findall(r'data-label="speed"><span>([^<]*)', source)[2] == "withheld"
    costs = re.findall(r'data-label="cost"><span>([^<]*)', source)
    assert [each == "withheld" for each in costs] == [False, False, True]
    assert re.search(r"\| tilewise \| \d+ \| [\d,]+ \| withheld \| withheld \|", twin)
    timed = re.search(r'aria-label="Held-out loss [^"]* by seconds of training: ([^"]*)"', source)
    assert timed is not None
    assert "plain from" in timed[1]
    assert "tilewise" not in timed[1]
    # Of the table of the curves: plain and sdpa have times, tilewise has none.
    assert re.search(r"10,240 \| [\d.]+ \([^)]*s\) \| [\d.]+ \([^)]*s\) \| [\d.]+ \|", twin)
    for text in (reader.text, twin):
        assert "withheld" in text
        assert "tilewise is worse" in text
        assert "77.7" not in text
        assert "Withheld: tilewise." in text
        assert "397,824" not in text  # its tokens per second


def paced(step: Step, wall: float, processor: float) -> Step:
    """A step that took less time by both clocks, by such factors."""
    return replace(step, wall_s=step.wall_s / wall, cpu_s=step.cpu_s / processor)


def test_load_that_moved_the_wall_clock_is_not_taken_for_a_slower_arm(tmp_path: Path) -> None:
    study = study_of(kernels_experiment())
    records = records_of(study, dict.fromkeys(("plain", "sdpa", "tilewise"), Behaviour(noise=1e-7)))
    for seed, load in enumerate((0.9, 0.8, 0.85)):  # what else ran beside sdpa
        record = records[f"kernels/sdpa/seed-{seed}"]
        record.steps = [paced(step, load, 1.0) for step in record.steps]
        record = records[f"kernels/tilewise/seed-{seed}"]
        record.steps = [paced(step, 2.4, 2.4) for step in record.steps]
    reader, _, _ = _written(folder_of(tmp_path, study, records))
    assert "by processor time: other work slowed the runs down" in reader.text
    assert f"2.40{TIMES} faster, equal losses" in reader.text  # its verdict
    assert f"Faster with equal losses: tilewise (2.40{TIMES})." in reader.text
    assert "Of sdpa by processor time alone" in reader.text
    verdict = judge(study, records).experiments[0]
    speeds = {each.arm: each.speed for each in verdict.arms}
    assert [speeds[arm].by for arm in ("sdpa", "tilewise")] == ["processor", "wall"]
    assert known(speeds["sdpa"].ratio).value == pytest.approx(1.0)
    (table,) = [each for each in evidence_tables(verdict) if each.key == "speed"]
    columns = table.head[1:]
    shown = {
        name.text: [column for column, cell in zip(columns, cells, strict=True) if cell != NONE]
        for name, *cells in table.rows
    }
    assert shown == {"plain": [*columns], "sdpa": ["tokens/CPU-s"], "tilewise": [*columns]}
    # With several threads the wall clock speaks, but not where seeds are too far apart.
    for each in records.values():
        environment = {**each.start.environment, "threads": 2}
        each.starts = [replace(each.start, environment=environment)]
    speeds = {each.arm: each.speed for each in judge(study, records).experiments[0].arms}
    assert (speeds["sdpa"].by, speeds["sdpa"].ratio) == ("wall", None)
    assert "wider than" in speeds["sdpa"].why


def test_a_speed_is_claimed_only_if_it_is_clear(tmp_path: Path) -> None:
    study = study_of(kernels_experiment())
    records = records_of(
        study, {arm: Behaviour(noise=1e-7) for arm in ("plain", "sdpa", "tilewise")}
    )
    for seed, pace in enumerate((0.5, 2.0, 1.5)):  # sdpa: sometimes faster, sometimes slower
        record = records[f"kernels/sdpa/seed-{seed}"]
        record.steps = [paced(step, pace, pace) for step in record.steps]
        record = records[f"kernels/tilewise/seed-{seed}"]
        record.steps = [paced(step, 2, 2) for step in record.steps]
    reader, _, _ = _written(folder_of(tmp_path, study, records))
    said = (
        f"against plain, tilewise is 2.00{TIMES} faster, with equal losses; sdpa changed nothing "
        "that matters; the speed of sdpa is withheld."
    )
    assert said in reader.text


def test_arms_that_wrote_the_same_are_shown_together(tmp_path: Path) -> None:
    study = study_of(kernels_experiment())
    records = records_of(study, {})
    wrote = {"plain": "def f():\n```\n", "sdpa": "def f():\n```\n", "tilewise": "other"}
    for name, record in records.items():
        _, arm, seed = name.split("/")
        if seed != "seed-0" or arm != "sdpa":
            record.sample = Sample("class A:", wrote[arm])
    # Seed 0 is not the first that all arms have.
    reader, source, twin = _written(folder_of(tmp_path, study, records))
    assert "<h3>plain and sdpa</h3>" in source
    assert '<span class="soft">class A:</span>def f():\n```\n</pre>' in source
    assert "<h3>tilewise</h3>" in source
    assert "seed 1: 0 tokens drawn" in reader.text
    assert "````\ndef f():\n```\n\n````" in twin


def test_what_plain_attention_would_need_is_shown_beside_the_fused_ones(tmp_path: Path) -> None:
    fused = experiment_of(
        Arm(name="tilewise", changes={"attention.implementation": "tilewise"}, kind="systems"),
        name="long",
        baseline=config_of(**{"attention.implementation": "sdpa", "model.context": 16384}),
        baseline_name="sdpa",
    )
    study = study_of(fused, kernels_experiment())
    quiet = {arm: Behaviour(noise=1e-7) for arm in ("plain", "sdpa", "tilewise")}
    environment = {"chip": "a chip", "memory_bytes": 8_000_000_000}
    folder = folder_of(tmp_path, study, records_of(study, quiet), environment=environment)
    reader, _, twin = _written(folder)
    assert reader.text.count("One step at context 16,384") == 1
    # 2 layers x 4 x 2 heads x 16,384^2 x 4 bytes are 17.2 GB, and 3 matrices of one layer 25.8 GB.
    assert f"2 layers {TIMES} 8 heads {TIMES} 16,384 {TIMES} 16,384 numbers" in reader.text
    assert "42.9 GB. This machine has 8 GB." in reader.text
    assert re.search(r"\| plain \(not run\) \| \S \| \d\d(\.\d)? GB \(estimated\) \|", twin)


LONG = [f"an-arm-with-a-very-long-name-{number}" for number in range(11)]
LOST = Behaviour(diverged={0: 3, 1: 4, 2: 5})
WHOLE = {"name": "lion", "lr": 0.0003, "weight_decay": 1.0}
RATES = Sweep(values={"baseline": (1e-3, 1e-2), "lion": (1.0, 10.0)})
# A study, how it comes out, what is said of it, and what is not.
SCENES: dict[str, tuple[Study, dict[str, Behaviour], tuple[str, ...], tuple[str, ...]]] = {
    "just begun": (
        study_of(kernels_experiment()),
        dict.fromkeys(("plain", "sdpa", "tilewise"), Behaviour(absent=(0, 1, 2))),
        ("0 of 9 runs are over", "too few evaluations for a curve"),
        ("<figure",),
    ),
    "one seed": (
        _study("lion", seeds=(0,)),
        {"lion": Behaviour(effect=-0.2)},
        ("lion is undecided", "One seed.", 'class="point"'),
        ('class="interval"',),
    ),
    "what has a column is not said again": (
        _study("wsd", "drop", "gone"),
        {
            "wsd": Behaviour(effect=-0.3),
            "gone": Behaviour(absent=(0,)),
            "drop": Behaviour(twin=True),
            "baseline": Behaviour(twin=True),
        },
        (
            "<p>Identical weights, bit for bit, with all 3 seeds.</p>",
            "<p>2 of 3 seeds are done; so far",
            "wsd is better",
        ),
        ("(Holm p",),
    ),
    "a whole choice": (
        _study(Arm(name="lion", changes={"optimizer": WHOLE})),
        {},
        ("optimizer = lion, lr 0.0003, weight_decay 1", "optimizer = lion, lr 0.0003, weight\\_"),
        (),
    ),
    "all diverged": (
        _study("lion", target=0.5),
        {"lion": LOST, "baseline": LOST},
        ("lion diverged",),
        ("not finished",),
    ),
    "a sweep that nothing survived": (
        _study("lion", sweep=RATES),
        {"lion": Behaviour(survives=0.1, absent=(0, 1, 2))},
        ("lion diverged", "Every value of its sweep diverged", "| lion | 10 | diverged |"),
        ("not finished",),
    ),
    "a target that nobody reached": (
        _study("lion", target=0.5),
        {},
        ("0 of 3", "not reached"),
        ("Tokens to 0.5",),  # a figure of nothing is not drawn
    ),
    "a task of images": (
        _study("lion", baseline=images.config_of("some.npz"), metric="accuracy"),
        dict.fromkeys(("baseline", "lion"), Behaviour(metric="accuracy")),
        ("8 examples",),
        ("tokens a step",),
    ),
    "many arms with long names": (
        _study(*LONG),
        {},
        (*LONG, "an-arm-with-a-…", "stroke-dasharray"),  # the colours have come round again
        (),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_what_is_said_of_a_study(scene: str, tmp_path: Path) -> None:
    study, behaviours, said, unsaid = SCENES[scene]
    records = records_of(study, behaviours)
    choose(study, records)
    reader, source, twin = _written(folder_of(tmp_path, study, records))
    assert [each for each in said if each not in reader.text + source + twin] == []
    assert [each for each in unsaid if each in reader.text + source] == []


def test_what_the_target_took_against_the_baseline(tmp_path: Path) -> None:
    study = _study("lion", target=2.6)
    records = records_of(study, {"lion": Behaviour(pace=2.0)})
    _, _, twin = _written(folder_of(tmp_path, study, records))
    (table,) = (part for part in twin.split("#### ") if part.startswith("To 2.6 "))
    (lion,) = (line for line in table.splitlines() if line.startswith("| lion"))
    assert "(1.00\N{MULTIPLICATION SIGN})" in lion
    assert "(0.50\N{MULTIPLICATION SIGN})" in lion
    (baseline,) = (line for line in table.splitlines() if line.startswith("| baseline"))
    assert "\N{MULTIPLICATION SIGN}" not in baseline


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="study"):
        gather(tmp_path)


def test_the_link_to_the_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tilewise

    checkout = tmp_path / "checkout"
    (checkout / "docs").mkdir(parents=True)
    (checkout / "docs" / "metrics.md").write_text("x")
    monkeypatch.setattr(tilewise, "__file__", str(checkout / "src" / "tilewise" / "__init__.py"))
    study = _study("lion")
    inside = folder_of(checkout / "studies" / "one", study, records_of(study))
    reader, _, twin = _written(inside)
    assert {"../../docs/metrics.md", "../../docs/metrics.md#speed"} <= set(reader.links)
    assert "](../../docs/metrics.md)" in twin
    page = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    linked = {each.partition("#")[2] for each in reader.links if "metrics.md#" in each}
    assert "attention-kernels" in linked
    assert linked <= anchors
    outside = folder_of(tmp_path / "elsewhere", study, records_of(study))
    assert not any("metrics" in link for link in _written(outside)[0].links)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The page and its twin, of a design with a target and of a sequential experiment."""
    design = experiment_of("a", "b", "a+b", name="both", design={"factors": ("a", "b")}, target=2.6)
    added = experiment_of(
        "clear", "noisy", name="added", seeds=tuple(range(6)), sequential=Sequential(looks=(3, 6))
    )
    study = study_of(design, added)
    behaviours = {
        "a": Behaviour(effect=-0.1, pace=0.5),
        "b": Behaviour(effect=0.5),
        "a+b": Behaviour(effect=-0.3, pace=0.8),
        "clear": Behaviour(effect=-0.2, absent=(3, 4, 5)),
        "noisy": Behaviour(effect=-0.01, noise=0.1),
    }
    folder: Path = tmp_path_factory.mktemp("deciding")
    page, twin = report.write(
        report.gather(folder_of(folder, study, records_of(study, behaviours)))
    )
    return page.read_text(), twin.read_text()


def test_effects_are_a_map_and_a_table(written: tuple[str, str]) -> None:
    page, twin = written
    assert "<h3>Effects and interactions, bits per byte</h3>" in page
    assert "var(--better)" in page
    assert "var(--worse)" in page
    assert "#### Effects of the factors" in twin
    assert "| a \N{MULTIPLICATION SIGN} b | better together |" in twin


def test_survival_and_the_front_have_their_tables(written: tuple[str, str]) -> None:
    page, twin = written
    assert "<h3>Runs not at 2.6 bits per byte yet</h3>" in page
    assert "<h3>Quality against cost</h3>" in page
    assert "#### Runs that have not reached the target" in twin
    front = twin.split("#### Quality against cost")[1].split("####")[0]
    rows = {line.split("|")[1].strip(): line for line in front.splitlines() if line[:1] == "|"}
    assert "on the front" in rows["a+b"]
    assert "on the front" in rows["baseline"]
    assert "beaten by" in rows["b"]


def test_seeds_that_were_not_needed_are_not_missing(written: tuple[str, str]) -> None:
    page, twin = written
    assert "not finished" not in page
    assert "not needed" in twin
    assert "looks after 3 and 6 seeds at levels of 1.3 and 3.8 %, which add up to 5 %" in twin
