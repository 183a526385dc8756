"""scripts/bench_sparse.py: what is measured, what is fitted, and how it is shown."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise import BlockMask

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bench_sparse.py"
ROW_S, TILE_S, DENSE_S = 5e-6, 11e-6, 10e-6


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def _case(kind: str, name: str, tiles: int, time_s: float) -> dict[str, Any]:
    times = [0.9 * time_s, time_s, 1.2 * time_s]
    return {
        "kind": kind,
        "name": name,
        "density": tiles / 8192,
        "tiles": tiles,
        "partial": 0,
        "forward": times,
        "backward": [2 * x for x in times],
    }


@pytest.fixture
def record() -> dict[str, Any]:
    """A run whose costs are known: 256 rows of 32 tiles."""
    cases = [_case("dense", "no mask", 8192, 8192 * DENSE_S)]
    cases += [
        _case("random", f"random {tiles}", tiles, 256 * ROW_S + tiles * TILE_S)
        for tiles in (8192, 4000, 800, 150, 0)
    ]
    cases.append(_case("pattern", "a pattern", 1024, 8192 * DENSE_S / 4))
    measured = {"length": 4096, "heads": 4, "rows": 256, "cases": cases}
    return {"dtype": "float32", "width": 64, "lengths": [measured]}


def test_the_fit_finds_the_costs(script: dict[str, Any], record: dict[str, Any]) -> None:
    for factor, name in ((1, "forward"), (2, "backward")):
        found = script["fit"](record["lengths"][0], name)
        assert found.row_s == pytest.approx(factor * ROW_S)
        assert found.tile_s == pytest.approx(factor * TILE_S)
        assert found.slope == pytest.approx(TILE_S / DENSE_S)
        assert found.worst < 1e-9
        assert 0.8 < found.exponent < 1


def test_without_a_cost_of_rows_time_is_proportional(
    script: dict[str, Any], record: dict[str, Any]
) -> None:
    measured = record["lengths"][0]
    for case in measured["cases"]:
        case["forward"] = [case["tiles"] * DENSE_S]
    found = script["fit"](measured, "forward")
    assert found[:4] == pytest.approx((0, DENSE_S, 1, 1), abs=1e-12)


def test_what_is_shown(script: dict[str, Any], record: dict[str, Any]) -> None:
    record["whole"] = {
        "length": 4096,
        "heads": 8,
        "threads": 2,
        "density": 0.1,
        "forward": [1.0, 2.0, 9.0],
        "backward": [3.0],
    }
    shown = script["report"](record)
    row = "| 4096, 4 | forward | 10.00 | 11.00 | +10 % | 0.86 | 5.0 | 12 %, 42 % | 0 % |"
    assert row in shown.splitlines()
    pattern = "| a pattern | 0.125 | 20.5 | 4.0 (4.0 to 4.0) | 41.0 | 4.0 (4.0 to 4.0) |"
    assert pattern in shown.splitlines()
    assert "| no mask | 1.000 | 81.9 |  | 163.8 |  |" in shown.splitlines()
    assert "8 heads on 2 threads (density 0.100), wall time: forward 2.00 s, backward 3.00" in shown
    assert "N = 4096, 4 heads, D = 64, float32:" in shown


@pytest.mark.thorough
def test_the_plot_is_drawn_the_same_every_time(
    script: dict[str, Any], record: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        script["draw"](record, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert b"<svg" in (tmp_path / "one.svg").read_bytes()


def test_a_short_run(script: dict[str, Any]) -> None:
    """Every case is there, with the tiles that its mask has, and times of both passes."""
    found = script["measure"](1024, 2, 2)
    kinds = [case["kind"] for case in found["cases"]]
    assert kinds == ["dense"] + ["random"] * 6 + ["pattern"] * 7
    assert (found["rows"], found["cases"][0]["tiles"]) == (32, 256)
    assert found["cases"][1]["density"] == 1
    masks = [mask for _, _, mask in script["block_masks"](1024)]
    for case, mask in zip(found["cases"], masks, strict=True):
        if mask is not None:
            assert case["density"] == mask.density
            assert case["tiles"] == 2 * (mask.counts.partial + mask.counts.full)
        assert len(case["forward"]) == len(case["backward"]) == 2
        assert min(*case["forward"], *case["backward"]) > 0
    whole = script["whole"](1024, 1, 1, 1)
    assert whole["density"] == BlockMask.of(script["patterns"].butterfly(128), 1024).density
    assert len(whole["forward"]) == len(whole["backward"]) == 1


@pytest.mark.thorough
def test_a_stored_run_is_shown_without_measuring(record: dict[str, Any], tmp_path: Path) -> None:
    stored = tmp_path / "sparse.json"
    stored.write_text(json.dumps(record))
    done = subprocess.run(
        [sys.executable, SCRIPT, "--from", stored, "--json", tmp_path / "again.json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| a pattern |" in done.stdout
    assert json.loads((tmp_path / "again.json").read_text()) == record
