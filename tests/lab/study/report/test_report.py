"""The report as a whole: complete, escaped, self-contained, and honest about what is missing."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.study.records_of import (
    COMMAND,
    Behaviour,
    config_of,
    experiment_of,
    folder_of,
    records_of,
    study_of,
)
from tests.lab.study.report.samples import EVIL, choose, kernels_experiment, rich_study
from tilelab.study.ask.config import Arm, Study, Sweep
from tilelab.study.records.events import RunRecord, Sample
from tilelab.study.report import gather, write
from tilelab.study.report.page import DEFINITIONS
from tilewise.errors import InvalidArgument

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


class _Reader(html.parser.HTMLParser):
    """Collects text, tags and links, and checks that what opens is closed in order."""

    VOID = frozenset({"meta", "link", "br", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("td", "th", "p", "dt", "dd", "small", "li"):
            self.text += " "
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.text += data


def _written(folder: Path) -> tuple[_Reader, str, str]:
    """The page read, its source, and the Markdown twin."""
    evidence = gather(folder)
    page, twin = write(evidence)
    assert json.loads((folder / "verdict.json").read_text()) == evidence.verdict.as_json()
    reader = _Reader()
    source = page.read_text("utf-8")
    reader.feed(source)
    reader.close()
    assert reader.open == []
    reader.text = re.sub(r"\s+", " ", reader.text)
    return reader, source, twin.read_text("utf-8")


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> tuple[_Reader, str, str]:
    study, records = rich_study()
    return _written(folder_of(tmp_path_factory.mktemp("rich"), study, records))


def _study(*arms: str | Arm, **fields: object) -> Study:
    return study_of(experiment_of(*arms, **fields))


def test_both_say_what_was_found(rich: tuple[_Reader, str, str]) -> None:
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


def test_the_verdicts_come_first(rich: tuple[_Reader, str, str]) -> None:
    reader, source, twin = rich
    assert source.count('class="verdicts"') == 3
    assert source.rindex('class="verdicts"') < source.index("<figure")
    assert twin.index("## Verdicts") < twin.index("## Evidence") < twin.index("## Repeat it")
    assert reader.text.index("What does attention") < reader.text.index("Loss by tokens")


def test_every_arm_has_its_verdict_and_its_interval(rich: tuple[_Reader, str, str]) -> None:
    _, source, _ = rich
    assert source.count('class="arm base"') == 3
    assert source.count('class="arm"') == 10
    assert source.count('class="forest ') == 9  # one arm diverged before two pairs: no effect
    labels = re.findall(r'class="forest \w+"[^>]*aria-label="([^"]+)"', source)
    assert f"lion: {MINUS}0.059 bits per byte, 95 % interval [{MINUS}0.065, {MINUS}0.052]" in labels
    # The kernel flag: an alarm where the arm did not ask for another kernel, a word where it did.
    assert source.count('class="flag alarm"') == 1
    assert source.count('class="flag"') == 2


def test_the_page_loads_nothing(rich: tuple[_Reader, str, str]) -> None:
    reader, source, _ = rich
    assert not {"script", "img", "iframe", "object"} & set(reader.tags)
    assert all(link.startswith(("#", "data:,")) or link == "" for link in reader.links)
    without = source.replace("http://www.w3.org/2000/svg", "").replace(
        "http://www.w3.org/1999/xlink", ""
    )
    assert not re.search(r"https?:|@import|url\((?!#)", without)


def test_figures_and_ids(rich: tuple[_Reader, str, str]) -> None:
    reader, source, _ = rich
    assert reader.tags.count("figure") == source.count('role="img" aria-label="') - 9 == 22
    ids = re.findall(r' id="([^"]+)"', source)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'(?:url\(#|href="#)([^)"]+)', source)
    assert set(targets) <= set(ids)


def test_the_config_marks_what_an_arm_changes(rich: tuple[_Reader, str, str]) -> None:
    reader, _, twin = rich
    assert "optimizer.lr 0.003 lion: 0.0003; hot: 0.1" in reader.text
    assert "| optimizer.lr | 0.003 | lion: 0.0003; hot: 0.1 |" in twin.replace("\\", "")
    assert (
        "optimizer.lr 0.001 muon: 0.01" in reader.text
    )  # what the sweep chose, not what it began with
    assert "optimizer.lr = 0.01 by its sweep" in reader.text


def test_it_is_made_from_config_and_records_alone(
    tmp_path: Path, rich: tuple[_Reader, str, str]
) -> None:
    study, records = rich_study()
    folder = folder_of(tmp_path / "copy", study, records)
    (folder / "report.html").write_text("something else")
    (folder / "index.sqlite").write_bytes(b"no database")
    _, source, twin = _written(folder)
    assert (source, twin) == rich[1:]
    assert not list(folder.glob(".report*"))  # nothing temporary is left


def _hostile() -> tuple[Study, dict[str, RunRecord]]:
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
    return study, records


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, *_hostile(), command=EVIL, environment={EVIL: EVIL, "chip": EVIL}, began=EVIL
    )
    reader, source, twin = _written(folder)
    assert not {"script", "img"} & set(reader.tags)
    assert "\u202e" not in source + twin  # turns the direction of what follows
    shown = EVIL.replace("\u202e", "\N{REPLACEMENT CHARACTER}")
    assert reader.text.count(shown) >= 9  # titles, question, kernels, command, facts
    outside = re.sub(r"^(`{3,}).*?^\1", "", twin, flags=re.S | re.M)  # but for the command's block
    assert "<script" in twin
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)\[a", outside)
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {3, 4, 5, 6, 7, 8, 10}


def test_a_fence_cannot_be_closed_from_within(tmp_path: Path) -> None:
    study = _study("lion")
    folder = folder_of(tmp_path, study, records_of(study), command="run\n````\n# owned")
    _, _, twin = _written(folder)
    assert "`````\nrun\n````\n# owned\n`````" in twin


PARTIAL = {
    "lion": Behaviour(stopped={0: 25, 1: 0}, absent=(2,)),
    "baseline": Behaviour(stopped={2: 12}),
}


def test_a_partial_study_says_what_is_missing(tmp_path: Path) -> None:
    study = _study("lion", "wsd", target=2.6)
    folder = folder_of(tmp_path, study, records_of(study, PARTIAL))
    reader, source, twin = _written(folder)
    for text in (reader.text, twin.replace("\\", "")):
        assert "This study is not finished: 5 of 9 runs are over." in text
        assert "optimizers/lion/seed-0: 25 steps done" in text
        assert "optimizers/lion/seed-1: not begun" in text
        assert "optimizers/lion/seed-2: not begun" in text
        assert "optimizers/baseline/seed-2: 12 steps done" in text
        assert "not finished" in text
    assert "<figure" in source


def test_a_study_that_has_just_begun(tmp_path: Path) -> None:
    study = study_of(kernels_experiment())
    reader, source, _ = _written(folder_of(tmp_path, study, {}))
    assert "0 of 9 runs are over" in reader.text
    assert "there is no curve to draw" in reader.text
    assert "<figure" not in source


def test_one_seed_is_no_verdict(tmp_path: Path) -> None:
    study = _study("lion", seeds=(0,))
    folder = folder_of(tmp_path, study, records_of(study, {"lion": Behaviour(effect=-0.2)}))
    reader, source, _ = _written(folder)
    assert "lion is undecided" in reader.text
    assert "One seed." in reader.text
    assert 'class="interval"' not in source
    assert 'class="point"' in source


def test_speed_is_withheld_until_the_losses_are_equal(tmp_path: Path) -> None:
    study = study_of(kernels_experiment())
    behaviours = {"tilewise": Behaviour(effect=0.5, pace=77.7), "sdpa": Behaviour(noise=1e-6)}
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


def test_a_speed_is_claimed_only_if_it_is_clear(tmp_path: Path) -> None:
    study = study_of(kernels_experiment())
    records = records_of(
        study, {arm: Behaviour(noise=1e-6) for arm in ("plain", "sdpa", "tilewise")}
    )
    for seed, pace in enumerate((0.5, 2.0, 1.5)):  # sdpa: sometimes faster, sometimes slower
        record = records[f"kernels/sdpa/seed-{seed}"]
        record.steps = [replace(step, wall_s=step.wall_s / pace) for step in record.steps]
        record = records[f"kernels/tilewise/seed-{seed}"]
        record.steps = [replace(step, wall_s=step.wall_s / 2) for step in record.steps]
    reader, _, _ = _written(folder_of(tmp_path, study, records))
    said = f"against plain, tilewise is 2.00{TIMES} faster; no clear difference in speed for sdpa."
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
    quiet = {arm: Behaviour(noise=1e-6) for arm in ("plain", "sdpa", "tilewise")}
    environment = {"chip": "a chip", "memory_bytes": 8_000_000_000}
    folder = folder_of(tmp_path, study, records_of(study, quiet), environment=environment)
    reader, _, twin = _written(folder)
    assert reader.text.count("One step at context 16,384") == 1
    # 2 layers x 4 x 2 heads x 16,384^2 x 4 bytes are 17.2 GB, and 3 matrices of one layer 25.8 GB.
    assert f"2 layers {TIMES} 8 heads {TIMES} 16,384 {TIMES} 16,384 numbers" in reader.text
    assert "42.9 GB. This machine has 8 GB." in reader.text
    assert re.search(r"\| plain \(not run\) \| \S \| \d\d(\.\d)? GB \(estimated\) \|", twin)


def test_what_the_table_shows_is_not_said_again(tmp_path: Path) -> None:
    study = _study("wsd", "drop", "gone")
    behaviours = {
        "wsd": Behaviour(effect=-0.3),
        "gone": Behaviour(absent=(0,)),
        "drop": Behaviour(twin=True),
        "baseline": Behaviour(twin=True),
    }
    reader, source, _ = _written(folder_of(tmp_path, study, records_of(study, behaviours)))
    assert "<p>Identical weights, bit for bit, with all 3 seeds.</p>" in source
    assert "<p>2 of 3 seeds are done; so far" in source
    assert "(Holm p" not in source  # it has a column of its own
    assert "wsd is better" in reader.text


def test_an_arm_that_changes_a_whole_choice(tmp_path: Path) -> None:
    whole = {"name": "lion", "lr": 0.0003, "weight_decay": 1.0}
    study = _study(Arm(name="lion", changes={"optimizer": whole}))
    reader, _, twin = _written(folder_of(tmp_path, study, records_of(study)))
    for text in (reader.text, twin.replace("\\", "")):
        assert "optimizer = lion, lr 0.0003, weight_decay 1" in text


def test_everything_diverged(tmp_path: Path) -> None:
    study = _study("lion", target=0.5)
    lost = Behaviour(diverged={0: 3, 1: 4, 2: 5})
    reader, _, _ = _written(
        folder_of(tmp_path, study, records_of(study, {"lion": lost, "baseline": lost}))
    )
    assert "lion diverged" in reader.text
    assert "not finished" not in reader.text


def test_a_sweep_that_nothing_survived(tmp_path: Path) -> None:
    sweep = Sweep(values={"baseline": (1e-3, 1e-2), "lion": (1.0, 10.0)})
    study = _study("lion", sweep=sweep)
    records = records_of(study, {"lion": Behaviour(survives=0.1, absent=(0, 1, 2))})
    choose(study, records)
    reader, _, twin = _written(folder_of(tmp_path, study, records))
    assert "lion diverged" in reader.text
    assert "not finished" not in reader.text
    assert "| lion | 10 | diverged |" in twin


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


def test_a_target_that_nobody_reached(tmp_path: Path) -> None:
    study = _study("lion", target=0.5)
    reader, _, twin = _written(folder_of(tmp_path, study, records_of(study)))
    assert "0 of 3" in reader.text
    assert "not reached" in reader.text
    assert "not reached" in twin
    assert "Tokens to 0.5" not in reader.text  # a figure of nothing is not drawn


def test_many_arms_with_long_names(tmp_path: Path) -> None:
    names = [f"an-arm-with-a-very-long-name-{number}" for number in range(11)]
    study = _study(*names)
    folder = folder_of(tmp_path, study, records_of(study))
    reader, source, _ = _written(folder)
    assert all(name in reader.text for name in names)
    assert "an-arm-with-a-…" in source
    assert "stroke-dasharray" in source  # the colours have come round again


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="study"):
        gather(tmp_path)


def test_a_damaged_record_does_not_hide_the_report_of_the_others(tmp_path: Path) -> None:
    study = _study("lion")
    folder = folder_of(tmp_path, study, records_of(study))
    record = folder / "runs/optimizers/lion/seed-1/record.jsonl"
    record.write_text("{}\n" + record.read_text())
    reader, source, text = _written(folder)
    for page in (reader.text, text):
        assert "optimizers/lion/seed-1: its record is damaged and left out" in page
        assert "optimizers/lion/seed-0: its record" not in page
    assert "<svg" in source


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
    outside = folder_of(tmp_path / "elsewhere", study, records_of(study))
    assert not any("metrics" in link for link in _written(outside)[0].links)


def test_the_definitions_are_in_the_documentation() -> None:
    page = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    assert {each.anchor for each in DEFINITIONS} <= anchors


def test_study_json_holds_what_the_page_says(tmp_path: Path) -> None:
    study = _study("lion")
    folder = folder_of(tmp_path, study, records_of(study))
    stored = json.loads((folder / "study.json").read_text())
    assert stored["hash"] in _written(folder)[0].text
