"""Counted bytes against the model: the parts without valgrind, what is stored, and (slow) a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT, ran
from tilelab.counted import __main__ as command
from tilelab.counted.cases import CASES, QUICK, SWEEP, Case, Row, table, verdict
from tilewise.errors import InvalidArgument

STORED = ROOT / "benchmarks" / "cachegrind" / "counted.json"
FILE = """desc: I1 cache: 32768 B, 64 B, 8-way associative
cmd: counted what=core
events: Ir I1mr ILmr Dr D1mr DLmr Dw D1mw DLmw
fl=counted.cc
fn=main
0 9 9 9 9 9 9 9 9 9
summary: 100 11 10 90 21 20 80 31 30
"""
CASE = Case("core", "forward", 512, 512 << 10, task=64)


def test_misses_are_read_by_name() -> None:
    assert command.misses(FILE) == 50
    turned = FILE.replace("Dr D1mr DLmr", "DLmr Dr D1mr")
    assert command.misses(turned) == 90 + 30


@pytest.mark.parametrize(
    "text",
    ["", FILE.replace("summary", "totals"), FILE.replace("DLmw", "DLm"), FILE.replace(" 30", "")],
)
def test_a_file_without_misses_is_refused(text: str) -> None:
    with pytest.raises(command.CountingError, match="DLmr and DLmw"):
        command.misses(text)


def test_every_cache_can_be_had() -> None:
    for case in CASES + SWEEP:
        sets = case.cache // (command.ways(case.cache) * command.LINE)
        assert sets.bit_count() == 1
        assert sets * command.ways(case.cache) * command.LINE == case.cache
    with pytest.raises(InvalidArgument, match="cache"):
        command.ways(11 << 10)


def test_the_core_cuts_the_tasks_of_a_case() -> None:
    """As csrc/passes/forward.h does: half the tiles while a thread has fewer than four tasks."""
    source = (ROOT / "csrc/passes/forward.h").read_text()
    assert "task_estimate(tiles) < 4 * f_.threads) tiles /= 2" in source
    assert "query_tiles = 8" in (ROOT / "csrc/products/modes.h").read_text()
    for case in CASES + SWEEP:
        tiles, threads = 8, case.threads
        while (
            tiles > 1
            and threads > 1
            and case.heads * -(-case.length // (tiles * 64)) < (4 * threads)
        ):
            tiles //= 2
        assert tiles * 64 == case.task, case.name
    with pytest.raises(InvalidArgument, match="task"):
        _ = replace(CASE, length=256).threads


def test_cases_differ_and_cover() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(QUICK) <= set(CASES)
    for cases in (QUICK, CASES):
        kinds = {(case.method, case.direction) for case in cases}
        assert len(kinds) == 4
        assert len({case.length for case in cases}) >= 3
        assert len({case.task for case in cases}) >= 3
        assert len({case.cache for case in cases}) >= 4
        assert any(case.causal for case in cases)
        assert any(case.heads > case.kv_heads for case in cases)
        assert any(case.listed for case in cases)


def test_plain_attention_has_no_mask_and_no_groups() -> None:
    with pytest.raises(InvalidArgument, match="plain with a mask"):
        Case("plain", "forward", 64, 2**20, causal=True)
    with pytest.raises(InvalidArgument, match="plain with a mask"):
        Case("plain", "forward", 64, 2**20, heads=2)


def test_lists_follow_their_keys_and_not_all_keys() -> None:
    """Of k and v twice as much for twice as long lists, and the same of twice as many keys."""

    def read(length: int, listed: int) -> int:
        case = Case("core", "forward", length, 192 << 10, heads=8, listed=listed)
        return sum(each.bytes for each in case.predicted().passes if each.name != "lists")

    rows = 1024 * (8 * (2 * 64 + 1) + 8 * 2) * 4  # q, out and lse, and two statistics
    assert read(1024, 128) - rows == 2 * (read(1024, 64) - rows)
    assert read(2048, 64) == 2 * read(1024, 64)
    with pytest.raises(InvalidArgument, match="listed"):
        Case("core", "backward", 64, 2**20, heads=8, listed=16)


def test_what_a_run_misses_without_attention_is_taken_off() -> None:
    asked: list[tuple[int, dict[str, str | int]]] = []

    def counter(cache: int, arguments: Mapping[str, str | int]) -> int:
        asked.append((cache, dict(arguments)))
        return 1000 if arguments["what"] == "nothing" else 10_000

    causal = replace(CASE, causal=True)
    rows = list(command.count([CASE, causal, replace(CASE, cache=1 << 20)], counter))
    assert [row.counted for row in rows] == [9000 * 64] * 3
    assert [row.predicted for row in rows] == [each.case.predicted().bytes for each in rows]
    whats = [(cache >> 10, arguments["what"]) for cache, arguments in asked]
    assert whats == [(512, "nothing"), (512, "core"), (512, "core"),
                     (1024, "nothing"), (1024, "core")]  # fmt: skip
    assert [arguments.get("causal") for _, arguments in asked] == [None, 0, 1, None, 0]


def test_too_far_is_said() -> None:
    predicted = CASE.predicted().bytes
    near, far = (Row(CASE, round(predicted / (1 + off)), predicted) for off in (0.149, -0.151))
    assert near.holds
    assert not far.holds
    assert "too far" in table([far])
    assert "too far" not in table([near])
    plain = replace(CASE, method="plain", task=512)
    assert Row(plain, 100, 119).holds
    assert not Row(plain, 100, 79).holds
    assert verdict([near, far]) == "ours: 2 cases, off by 15.1 % at the most (15 % allowed)"


def test_without_valgrind_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: valgrind is not installed")
    (tmp_path / "valgrind").write_text("#!/bin/sh\n")
    (tmp_path / "valgrind").chmod(0o755)
    assert command.main(["--driver", str(tmp_path / "none")]) == 0
    assert "is not built: scripts/counted.sh" in capsys.readouterr().out


def test_a_process_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "valgrind").write_text("#!/bin/sh\necho no such tool >&2\nexit 7\n")
    (tmp_path / "valgrind").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(command.CountingError, match="ended with 7: no such tool"):
        command.counted(tmp_path / "counted", 2**20, {"what": "core"})


def test_ours_and_plain_have_to_agree_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("valgrind", 0), ("counted", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho out 0.5\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert command.main(["--driver", str(tmp_path / "counted")]) == 1
    assert "ours and plain attention differ (1): out 0.5" in capsys.readouterr().err
    text = (tmp_path / "counted").read_text()
    (tmp_path / "counted").write_text(text.replace("exit 1", f"exit {command.NO_AVX2}"))
    assert command.main(["--driver", str(tmp_path / "counted")]) == 0
    assert capsys.readouterr().out == "skipped: out 0.5\n"


def test_what_is_stored_holds_for_the_model_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are stored; predictions are made anew."""
    stored = json.loads(STORED.read_text())
    assert stored["format"] == command.FORMAT
    rows = [Row.read(each) for each in stored["rows"]]
    assert tuple(row.case for row in rows) == CASES
    assert tuple(Case(**each["case"]) for each in stored["sweep"]) == SWEEP
    assert all(row.holds for row in rows), table(rows)
    assert max(abs(row.off) for row in rows if row.case.method == "plain") < 0.05
    assert command.main(["--from", str(STORED)]) == 0
    assert capsys.readouterr().out == f"{table(rows)}\n\n{verdict(rows)}\n"


def test_the_page_has_the_table() -> None:
    stored = json.loads(STORED.read_text())
    rows = [Row.read(each) for each in stored["rows"]]
    page = (ROOT / "docs" / "io-model.md").read_text()
    assert table(rows) in page
    assert verdict(rows) in page


def test_ci_counts() -> None:
    steps = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^step counted counted$", steps, re.M)
    assert "scripts/counted.sh --quick" in steps


@pytest.mark.slow
def test_a_run_under_cachegrind() -> None:
    """What continuous integration runs: build, count, compare."""
    for tool in ("valgrind", "cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    environment = {**os.environ, "PYTHON": sys.executable}
    script = ROOT / "scripts" / "counted.sh"
    done = ran("bash", script, "--quick", timeout=None, env=environment)
    assert "too far" not in done.stdout
    assert f"ours: {sum(case.method == 'core' for case in QUICK)} cases" in done.stdout
