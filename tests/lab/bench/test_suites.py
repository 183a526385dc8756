"""The ``tilewise bench`` suites: small runs of each, records, pages, comparison."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from tests.lab.pages import Page
from tests.variants_catalogue import assert_all_close
from tilelab.bench import children, command, compare, main
from tilelab.bench.children import STEPS
from tilelab.bench.page import ABOUT, html, markdown
from tilelab.bench.sentences import crossing, crossings_in_words, sentences
from tilelab.bench.steps import Point, Step, SuiteRecord
from tilelab.bench.suites import CURE, DOUBLE, FEW, catalogue, layer, predicted
from tilelab.bench.tables import suite_tables
from tilelab.cases.case import Case
from tilelab.cases.table import rows
from tilelab.cases.variants import seen_by
from tilelab.common.files import COMPLETE, INTERRUPTED
from tilelab.peers.methods import (
    OURS,
    by_drawn_lists,
    flex_mask,
    flex_score,
    masked_by_lists,
    own_masks,
    rivals,
)
from tilelab.peers.work import Work, draw, flops, work_of
from tilewise import attention, visible_pairs
from tilewise.errors import InvalidArgument, TilewiseError
from tilewise.kernels.cpu import absence

needs_core = pytest.mark.skipif(absence() is not None, reason="the compiled core is not built")

MACHINE: dict[str, Any] = {
    "chip": "Chip <9>",
    "cores": 2,
    "instruction_set": "avx2",
    "system": "Linux x86_64",
    "python": "3.11",
    "versions": {"torch": "2.13"},
    "load_average": [0.5, 1.5],
}


def assert_sound(text: str) -> Page:
    """The page is well-formed and loads nothing."""
    page = Page(text)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "<script" not in text
    return page


def point(length: int, method: str, seconds: float, **more: Any) -> Point:
    samples = (seconds * 0.99, seconds, seconds * 1.01)
    return Point("paper", "forward", length, "float32", method, samples=samples, **more)


def record(*points: Point) -> SuiteRecord:
    return SuiteRecord(["paper"], MACHINE, "cpu", {"minutes": 1}, COMPLETE, 1.0, list(points))


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """A small run of a suite; its JSON."""
    argv = [name, "--quick", "--lengths", "33,64", "--rounds", "2", "--out", str(folder)]
    assert main([*argv, "--minutes", "2", *options]) == 0
    values: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert values["status"] == COMPLETE
    values["stored"] = values["points"]
    values["points"] = [asdict(each) for each in SuiteRecord.read(folder / f"{name}.json").points]
    # torch's own methods may break the 2x rule on some processors; ours may not.
    bad = [p for p in values["points"] if p["status"] in ("wrong", "failed")]
    assert not [p for p in bad if p["method"] == OURS or p["status"] == "failed"]
    page = assert_sound((folder / f"{name}.html").read_text())
    assert "svg" in page.tags
    assert (folder / f"{name}.md").read_text().startswith("# tilewise bench")
    return values


def test_the_entry_knows_every_suite() -> None:
    assert command.SUITES.keys() == ABOUT.keys()


@needs_core
def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = run("speed", tmp_path)
    found = {(p["method"], p["case"]) for p in values["points"] if p["samples"]}
    assert ("tilewise", "backward, causal") in found
    assert ("sdpa flash", "forward, full") in found
    assert ("plain, checkpointed", "backward, full") in found
    sample = next(p for p in values["stored"] if p.get("samples"))
    assert len(sample["samples"]) == 2
    low, high, first, third = sample["spread"]
    assert low <= first <= sample["median"] <= third <= high
    assert values["machine"]["versions"]["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(values)
    assert "Against the fastest other exact method" in capsys.readouterr().out


@pytest.mark.thorough
@needs_core
def test_accuracy(tmp_path: Path) -> None:
    values = run("accuracy", tmp_path)
    ours = [p for p in values["points"] if p["method"] == "tilewise"]
    kinds = ["usual scores", "large scores"]
    kinds += [f"{m} queries of {d}, large scores" for m, d in FEW]
    assert {p["case"] for p in ours} == {
        f"{direction}, {kind}" for direction in ("forward", "backward") for kind in kinds
    }
    assert all(0 < p["samples"][0] <= p["allowed"] for p in ours)


@pytest.mark.slow
@needs_core
def test_memory(tmp_path: Path) -> None:
    values = run("memory", tmp_path)
    found = {(p["case"], p["method"]): p for p in values["points"] if p["quantity"] == "bytes"}
    for case in ("forward", "training"):
        for method in ("tilewise", "plain"):
            point = found[case, method]
            assert point["predicted"] > 0
            assert 0 <= point["samples"][0] < point["predicted"] + 2e6  # code, and whole pages
    steps = [p for (case, _), p in found.items() if case == DOUBLE]
    assert [p["method"] for p in steps] == [name for name, _ in STEPS]
    assert {p["method"] for (case, _), p in found.items() if case == CURE} == {
        "1 row", "16 rows", "64 rows",
    }  # fmt: skip
    text = (tmp_path / "memory.md").read_text()
    assert "The cure, 1 row at a time" in text
    assert "step by step: the scores take" in text


@pytest.mark.slow
@needs_core
def test_paper(tmp_path: Path) -> None:
    values = run("paper", tmp_path)
    timed = [p for p in values["points"] if p["quantity"] == "seconds"]
    names = {p["method"] for p in timed if not p["exact"]}
    assert names == {method.name for method in rivals()}
    assert all(p["error"] is not None for p in timed if p["samples"] and not p["exact"])
    assert all(p["error"] is None for p in timed if p["exact"])
    whole = {p["method"]: p["error"] for p in timed if p["length"] == 33 and p["samples"]}
    for name in ("local", "Longformer", "BigBird", "tilewise butterfly"):
        assert whole[name] < 1e-5  # so short that they see everything
    assert whole["linear attention"] > 0.1
    assert [p for p in values["points"] if p["quantity"] == "bytes" and p["method"] == "Performer"]
    text = (tmp_path / "paper.md").read_text()
    assert "faster than tilewise" in text
    assert "no probabilities to drop" in text


@needs_core
def test_models(tmp_path: Path) -> None:
    values = run("models", tmp_path, "--models", "gpt2,whisper-tiny")
    assert {p["case"] for p in values["points"]} == {
        f"{model}, {words}"
        for model in ("gpt2", "whisper-tiny")
        for words in ("forward", "training")
    }
    assert {p["length"] for p in values["points"]} == {64}


@needs_core
@pytest.mark.thorough
def test_variants(tmp_path: Path) -> None:
    values = run("variants", tmp_path)
    ours = {p["case"] for p in values["points"] if p["method"] == "tilewise" and p["samples"]}
    names = {each.name for each in catalogue(64, "cpu")}
    assert ours == {f"{name}, {words}" for name in names for words in ("forward", "backward")}
    assert "Time over no variant, forward" in (tmp_path / "variants.md").read_text()


@pytest.mark.slow
@needs_core
def test_list_memory(tmp_path: Path) -> None:
    """Twice the keys are twice the bytes by lists, and four times by a mask."""
    values = run("list-memory", tmp_path, "--lengths", "2048,4096")
    held = {(p["case"], p["method"], p["length"]): p["samples"][0] for p in values["points"]}
    for case in ("forward", "training"):
        by_lists, by_mask = (
            held[case, method, 4096] / held[case, method, 2048]
            for method in ("tilewise, key lists", "sdpa, mask")
        )
        assert by_lists < 2.5 < by_mask
    text = (tmp_path / "list-memory.md").read_text()
    assert "- forward, sdpa, mask: " in text


def test_lists_and_their_mask_name_the_same_keys() -> None:
    """Each row has as many distinct keys, in ascending order, or all where there are fewer."""
    case = Case("", heads=2, queries=70, keys=40, listed=7, dtype=torch.float64)
    work = work_of(case, "list-memory")
    lists = work.drawn_lists
    assert lists.shape == (70, 7)
    assert bool((lists.diff(dim=1) > 0).all())
    assert torch.equal(seen_by(lists, 40).nonzero()[:, 1].view(70, 7), lists.long())
    assert work_of(replace(case, listed=50)).drawn_lists.shape == (70, 40)
    given = draw(work)
    by_lists, by_mask = (
        {"out": method.make(work, given)(given.q, given.k, given.v)}
        for method in (by_drawn_lists(), masked_by_lists())
    )
    assert_all_close(by_lists, by_mask)


@needs_core
@pytest.mark.thorough
def test_widths(tmp_path: Path) -> None:
    """Every width of keys and values; latents whose values lie in the keys, forward alone."""
    values = run("widths", tmp_path)
    ours = {p["case"] for p in values["points"] if p["method"] == OURS and p["samples"]}
    both = ("D80", "D96", "D112", "D192 Dv128", "D256", "D320 Dv256", "D512")
    due = {f"{name}, {words}" for name in both for words in ("forward", "backward")}
    assert ours == due | {"latent, 1 query, forward", "latent, 64 queries, forward"}
    (latent,) = (each for each in rows("head widths") if each.name == "latent, 1 query")
    given = draw(work_of(latent, keys=40))
    assert given.v.shape[-1] == 512
    assert given.v.data_ptr() == given.k.data_ptr()
    assert flops(work_of(latent, keys=40)) == 2 * 16 * 40 * (576 + 512)


@pytest.mark.parametrize("variant", catalogue(40, "cpu"), ids=lambda each: each.name)
def test_functions_for_flex_mean_the_same(variant: Work) -> None:
    m, n = torch.arange(40)[:, None], torch.arange(40)
    mask, score = flex_mask(variant), flex_score(variant)
    assert (score is None) == (variant.score == ())
    for h in range(4):
        if mask is not None:
            seen = visible_pairs(variant.drawn_mask, 40, 40, heads=4)[0, h]
            assert torch.equal(seen, mask(0, h, m, n).expand(40, 40))
        if score is not None:
            q, k = torch.zeros(2, 1, 4, 40, 2).unbind(0)
            v = torch.eye(40).expand(1, 4, 40, 40)
            keywords = {"mask": variant.drawn_mask, "score": variant.drawn_score}
            got = attention(q, k, v, **keywords)[0, h]
            shown = mask(0, h, m, n) if mask is not None else torch.ones(40, 40).bool()
            logits = score(torch.zeros(40, 40), 0, h, m, n).masked_fill(~shown, -torch.inf)
            expected = logits.softmax(-1)
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("variant", catalogue(40, "cpu"), ids=lambda each: each.name)
def test_flex_gets_a_block_mask_for_every_head_that_has_its_own(variant: Work) -> None:
    if not variant.mask:
        return
    own = own_masks(variant, draw(variant))
    assert own == (None, 4 if variant.name == "window of a head" else None)


def test_a_layer_is_attention_between_projections() -> None:
    work = Work("x", 1, 4, 2, 9, 9, 8, 8)
    shapes = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.append((q.shape, k.shape, v.shape))
        return q

    assert layer(work, draw(work), attend)().shape == (1, 9, 32)
    assert shapes == [((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8))]
    both = replace(work, passes="both")
    grads = layer(both, draw(both), attend)()
    assert [tuple(grad.shape) for grad in grads] == [(1, 9, 32), (64, 32), (32, 32)]


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("the system's libraries do not survive a fork")

    def die(_: Any) -> Any:
        os.kill(os.getpid(), 9)

    monkeypatch.setattr(children, "_attempt", die)
    assert children._in_a_fork({}) == "its process was killed (signal 9)"


def test_predicted_memory_is_beyond_the_operands() -> None:
    work = Work("forward", 1, 2, 2, 128, 128, 64, 64)
    matrix, operand = 2 * 128 * 128 * 4, 2 * 128 * 64 * 4
    assert predicted(work, "plain") == 2 * matrix + operand
    assert predicted(work, "tilewise") == operand + 3 * 2 * 128 * 4
    both = replace(work, passes="both")
    assert predicted(both, "plain") == 3 * matrix + 4 * operand
    assert predicted(both, "sdpa math") is None


@needs_core
def test_ctrl_c_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_off(_: Any) -> Iterator[Point]:
        yield replace(point(64, "tilewise", 1.0), suite="speed")
        raise KeyboardInterrupt

    steps = [Step("one", lambda _: []), Step("two", broken_off), Step("three", broken_off)]
    monkeypatch.setitem(command.SUITES, "speed", lambda _: steps)
    assert main(["speed", "--out", str(tmp_path)]) == 130
    values = SuiteRecord.read(tmp_path / "speed.json")
    assert values.status == INTERRUPTED
    assert len(values.points) == 1
    assert "stopped with Ctrl-C" in (tmp_path / "speed.html").read_text()
    assert "[2/3] two" in capsys.readouterr().err


@needs_core
def test_the_time_budget_ends_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(command.SUITES, "speed", lambda _: [Step("one", lambda _: [])] * 3)
    assert main(["speed", "--out", str(tmp_path), "--minutes", "1e-9"]) == 0
    assert (
        SuiteRecord.read(tmp_path / "speed.json").status == "speed: 0 of 3 steps fit into the time"
    )


@needs_core
def test_a_step_that_fails_is_told_and_the_others_are_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Any) -> Iterator[Point]:
        yield replace(point(64, "tilewise", 1.0), suite="speed")
        raise TilewiseError(f"the process in {tmp_path} ended with 3")

    fine = [replace(point(128, "tilewise", 1.0), suite="speed")]
    steps = [Step("one", broken), Step("two", lambda _: fine)]
    monkeypatch.setitem(command.SUITES, "speed", lambda _: steps)
    monkeypatch.setitem(command.SUITES, "accuracy", lambda _: [])
    assert main(["speed", "accuracy", "--out", str(tmp_path)]) == 1
    path = tmp_path / "speed-accuracy.json"
    found = SuiteRecord.read(path)
    assert found.status == "a step failed"
    assert len(found.points) == 2
    assert str(tmp_path) not in path.read_text()
    assert "ended with 3" in capsys.readouterr().err.replace("\n", "")


@needs_core
def test_ours_wrong_is_exit_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = Point("speed", "forward", 64, "float32", "tilewise", status="wrong", note="out: NaN")
    monkeypatch.setitem(command.SUITES, "speed", lambda _: [Step("one", lambda _: [bad])])
    assert main(["speed", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "speed.md").read_text()
    assert "WRONG" in text
    assert "Breaks the 2x rule" in text


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["speed", "nothing"], ["speed", "--minutes", "0"], ["speed", "--lengths", "0"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    assert "no suite nothing" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="nobody"):
        main(["speed", "--models", "nobody"])


def test_points_of_other_rows_are_not_compared(tmp_path: Path) -> None:
    few, many = (
        point(64, "tilewise", 1.0, shape={"batch": 1, "queries": rows}) for rows in (16, 64)
    )
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    record(few).write(paths[0])
    record(many).write(paths[1])
    before, after = (compare.read(path) for path in paths)
    assert len(compare.compare(before, before)) == 1
    assert not compare.compare(before, after)


def test_a_record_comes_back(tmp_path: Path) -> None:
    before = record(point(64, "tilewise", 1.0, predicted=2.0), point(64, "x", 1.0, exact=False))
    path = tmp_path / "a" / "paper.json"
    before.write(path)
    assert SuiteRecord.read(path) == before
    lines = path.read_text().splitlines()
    assert sum('"paper", "case"' in line for line in lines) == 2  # a point is one line
    before.points.append(replace(before.points[0], method="y", shape={"batch": 3}))
    before.write(path)
    assert SuiteRecord.read(path) == before
    before.points.clear()
    before.write(path)
    assert SuiteRecord.read(path) == before
    for text in ("{", "[]", '{"format": 1}'):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match="suite of the bench"):
            SuiteRecord.read(path)


def test_the_page_is_sound_and_escapes() -> None:
    made = record(
        point(64, "tilewise", 1.0),
        point(128, "tilewise", 4.0, predicted=3.0),
        point(64, "<b>&", 2.0, exact=False, error=0.5),
        point(128, "<b>&", 3.0, exact=False, error=0.25),
        Point("paper", "forward", 64, "float32", "plain", status="skipped", note="<i>why</i>"),
    )
    text = html(made)
    page = assert_sound(text)
    assert page.tags.count("svg") == 1
    assert "<b>&" not in text
    assert "&lt;i&gt;why" in text
    assert "Chip &lt;9&gt;" in text
    assert "error 0.25" in markdown(made)
    assert "| plain | - |" in markdown(made)


def test_crossing_is_interpolated() -> None:
    exact = {128: 1.0, 256: 4.0, 512: 16.0}
    linear = {128: 2.0, 256: 4.0 * 2**0.0, 512: 8.0}
    found = crossing(exact, linear)
    assert found is not None
    assert found.at == pytest.approx(256)
    assert found.gain == pytest.approx(2)
    between = crossing(exact, {128: 2.0, 256: 2.0})
    assert between is not None
    assert between.at == pytest.approx(128 * 2**0.5)
    never = crossing(exact, {512: 17.0})
    assert never is not None
    assert never.at is None
    always = crossing(exact, dict.fromkeys(exact, 0.5))
    assert always is not None
    assert always.at == 128
    back = crossing(exact, {128: 0.5, 256: 5.0, 512: 8.0})  # what it loses again does not count
    assert back is not None
    assert 256 < (back.at or 0) < 512
    assert crossing(exact, {1: 1.0}) is None


def test_where_none_is_faster_one_sentence_says_so() -> None:
    """At one length, and by less than what is worth a word."""
    hardly = crossing({128: 1.0, 512: 16.0}, {128: 2.0, 512: 15.9})
    assert hardly is not None
    assert hardly.at is None
    none = crossings_in_words("forward", "ours", {"a": hardly, "b": hardly})
    assert none == "forward: up to 512 none is faster than ours: a and b."


def _lead_of(record: SuiteRecord) -> str:
    found = re.search(r"<h1>(.*?)</h1>", html(record))
    assert found is not None
    return found[1]


def test_the_page_leads_with_the_one_ratio_that_matters() -> None:
    """Times before memory before accuracy; without any of them the suites' names."""
    work: dict[str, Any] = {"case": "forward", "dtype": "float32"}

    def times(length: int, method: str, seconds: float, exact: bool = True) -> Point:
        samples = (seconds,)
        return Point("speed", length=length, method=method, samples=samples, exact=exact, **work)

    def held(method: str, size: float) -> Point:
        return Point("memory", length=8, method=method, quantity="bytes", samples=(size,), **work)

    speed = [times(8, OURS, 9.0), times(16, OURS, 2.0), times(8, "plain", 1.0)]
    speed += [times(16, "plain", 8.0), times(16, "sdpa", 3.0), times(16, "wrong", 0.1, exact=False)]
    memory = [held(OURS, 1e3), held("plain", 5e4)]
    error = [
        Point("accuracy", length=8, method=OURS, quantity="error", samples=(0.3,), allowed=0.4,
              **work)
    ]  # fmt: skip
    machine = {"chip": "x", "versions": {"torch": "2", "python": "3"}, "core": "c", "isa": "i"}

    def record(*points: Point) -> SuiteRecord:
        suites = list(dict.fromkeys(point.suite for point in points)) or ["speed"]
        made = SuiteRecord.begin(suites, "cpu", {})
        made.machine |= machine
        made.points += points
        return made

    assert _lead_of(record(*speed, *memory)) == "1.50x the speed of the fastest other exact method"
    assert _lead_of(record(*memory, *error)) == "50x less memory than plain attention"
    assert _lead_of(record(*error)) == "75% of the allowed error"
    assert _lead_of(record()) == "speed"


def test_the_page_states_one_crossing_and_tables_all() -> None:
    """The first case in a sentence, every case in the first table, which is open."""
    times = {"tilewise": (1.0, 4.0), "sdpa": (2.0, 8.0), "A": (2.0, 2.0), "B": (0.5, 1.0)}
    times |= {"C": (9.0, 99.0), "tilewise butterfly": (1.5, 0.5)}
    points = [
        replace(point(n, name, each, exact=name in ("tilewise", "sdpa")), case=case)
        for case, more in (("both", 1.0), ("forward", 3.0))
        for name, both in times.items()
        for n, each in zip((128, 512), (both[0] * more ** (name == "A"), both[1]), strict=True)
    ]
    made = record(*points)
    said = sentences(made, "paper")
    assert said[0] == (
        "both, float32: tilewise butterfly from about 160 on and A from about 260 on are faster "
        "than tilewise; B is faster at every length from 128 on; C is not, up to 512."
    )
    assert not [line for line in said[1:] if line.startswith("forward")]
    assert "tilewise butterfly against the fastest of the others" in said[1]
    assert "faster in 2 of 2 cases, 2.00 times (both, float32 at 512; B)" in said[1]
    first = suite_tables(made, "paper")[0]
    assert first.head == ("case", "A", "B", "C", "tilewise butterfly")
    assert first.rows[0] == (
        "both, float32",
        "from about 260",
        "from 128",
        "not up to 512",
        "from about 160",
    )
    assert first.rows[1][1] == "from about 350"
    page = html(made)
    assert_sound(page)
    assert page.count("<details open") == 1
    assert page.index("<details open") < page.index(first.title)


def test_the_page_says_what_was_asked_in_words() -> None:
    made = record(point(64, "tilewise", 1.0))
    made.settings = {"lengths": [64, 128], "dtypes": ["float32"], "minutes": 2.0, "quick": False}
    assert "Asked for: lengths 64, 128; dtypes float32; minutes 2; quick no." in html(made)


def test_compare_flags_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = record(point(64, "tilewise", 1.0), point(64, "sdpa", 1.0), point(64, "old", 1.0))
    after = record(point(64, "tilewise", 1.5), point(64, "sdpa", 1.01), point(64, "new", 1.0))
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for each, path in zip((before, after), paths, strict=True):
        each.write(Path(path))
    assert main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert "slower" in text
    assert "1 of 2 points moved" in text
    assert "In one file only: 1 of the first, 1 of the second" in text
    assert "sdpa" not in text
    assert main(["compare", *paths, "--all", "--check"]) == 1
    assert "sdpa" in capsys.readouterr().out
    assert main(["compare", *reversed(paths), "--check"]) == 0
    assert "faster" in capsys.readouterr().out


def test_noise_widens_with_the_spread() -> None:
    steady, loose = (replace(point(64, "x", 1.0), samples=s) for s in ((1, 1, 1.0), (0.5, 1, 2.0)))
    assert compare.noise(steady) == 0
    assert compare.noise(loose) > 0.3
    moved = compare.Moved(loose, 1.0, 1.2, 0.5)
    assert moved.word == ""
    assert moved._replace(noise=0.03).word == "slower"


def test_what_others_scatter_is_noise_too() -> None:
    """Methods that no change of ours moves tell how much two runs differ."""
    names = [f"sdpa {index}" for index in range(6)]
    factors = (0.9, 1.1, 0.92, 1.08, 0.95, 1.05)
    before = compare.Points("x", {p.key: p for p in [point(64, n, 1.0) for n in names]})
    moving = [point(64, n, f) for n, f in zip(names, factors, strict=True)]
    for each in (before.points, after := {p.key: p for p in moving}):
        ours = point(64, "tilewise", 1.0 if each is before.points else 1.15)
        each[ours.key] = ours
    moved = {m.point.method: m for m in compare.compare(before, compare.Points("x", after))}
    assert moved["tilewise"].noise > 0.2
    assert moved["tilewise"].word == ""
    held = replace(point(64, "sdpa", 1.0), quantity="bytes")
    assert compare.drift([moved["tilewise"], compare.Moved(held, 1.0, 2.0, 0.0)]) == 1.0
    assert compare.scatter([0.1] * 4) == 0
    assert compare.scatter([0.0, 0.1, -0.1, 0.1, -0.1]) == pytest.approx(0.148, rel=0.01)


def test_stored_runs_of_the_cases_with_goals_compare(capsys: pytest.CaptureFixture[str]) -> None:
    stored = sorted(Path(__file__).parents[3].glob("benchmarks/*/cpu.json"))
    assert stored
    assert main(["compare", str(stored[0]), str(stored[0]), "--check"]) == 0
    assert "0 of" in capsys.readouterr().out


def test_a_stored_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paper.json"
    record(point(64, "tilewise", 1.0), point(128, "tilewise", 2.0)).write(path)
    assert main(["show", str(path), "--markdown"]) == 0
    assert "| tilewise |" in capsys.readouterr().out
    assert_sound(path.with_suffix(".html").read_text())


def test_figures_stand_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paper.json"
    record(point(64, "tilewise", 1.0), point(128, "tilewise", 2.0)).write(path)
    assert main(["show", str(path), "--figures", str(tmp_path / "figures")]) == 0
    (file,) = (tmp_path / "figures").iterdir()
    assert file.name == "paper-0.svg"
    text = file.read_text()
    root = ElementTree.fromstring(text)
    assert float(root.attrib["width"]) > float(root.attrib["height"]) > 100
    used, made = (set(re.findall(form, text)) for form in (r"var\((--[\w-]+)\)", r"(--[\w-]+):"))
    assert used
    assert used <= made
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"url\((?!#)|https?://(?!www\.w3\.org)", text)
