"""The scripts: the core built in other ways (sanitizers, aarch64), and studies stored small."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ran
from tilewise import BlockMask

ROOT = Path(__file__).resolve().parent.parent


def _tool(variable: str, name: str) -> str:
    """The tool that an environment variable or PATH names, or a skip that says what is missing."""
    tool = os.environ.get(variable, name)
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed (or name another: {variable}=...)")
    return tool


def _run(script: str, *arguments: str) -> None:
    # A path of the caller's would hide the package that a script has built.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran("bash", ROOT / "scripts" / script, *arguments, timeout=None, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_the_core_under_sanitizers() -> None:
    """scripts/other_core.sh, with the tests that go furthest into odd sizes, masks and threads."""
    compiler = _tool("CXX", "g++")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # A compiler that does not have the file answers with its bare name.
    if not os.path.isabs(found):
        pytest.skip(f"{compiler} has no libasan.so (Debian, Ubuntu: apt install libasan8)")
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv, which the sanitized build borrows from: call ./run setup first")
    _run("other_core.sh", "sanitize", "tests/kernels", "-q", "-k", "not tiled and not memory")


@pytest.mark.slow
def test_matrix_tiles_in_software() -> None:
    """AMX kernels on a processor without AMX: the C++ tests, and those of kernels and key lists."""
    processor = Path("/proc/cpuinfo")
    flags = set(processor.read_text().split()) if processor.exists() else set()
    if not {"avx512_bf16", "avx512vbmi"} <= flags:
        pytest.skip("this processor lacks AVX512_BF16 or AVX512_VBMI")
    _run("core_test.sh", "build/tiles/core_test", "-DTILEWISE_SOFTWARE_TILES=ON")
    _run("other_core.sh", "tiles", "tests/kernels/cpu", "tests/test_key_lists.py", "-q")


@pytest.mark.slow
def test_the_core_on_aarch64() -> None:
    """scripts/cross_test.sh: the C++ tests, cross-compiled and emulated."""
    _tool("AARCH64_CXX", "aarch64-linux-gnu-g++")
    _tool("AARCH64_RUN", "qemu-aarch64")
    _run("cross_test.sh")


@pytest.mark.slow
def test_python_on_aarch64() -> None:
    """The same script with a Python and a torch for aarch64: decoding, on each instruction set."""
    _tool("AARCH64_CXX", "aarch64-linux-gnu-g++")
    _tool("AARCH64_RUN", "qemu-aarch64")
    _tool("MMDEBSTRAP", "mmdebstrap")
    _run("cross_test.sh", "--python", "tests/kernels/cpu/test_decode.py")


@pytest.mark.slow
def test_the_core_for_other_systems() -> None:
    """scripts/cross_compile.sh: every file for macOS and Windows, warnings as errors."""
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv, into which the script installs ziglang: call ./run setup first")
    _run("cross_compile.sh")


def test_a_stored_study_is_whole(tmp_path: Path) -> None:
    """Every record comes back as it was, checkpoints stay behind, and the bytes are repeatable."""
    study = tmp_path / "study"
    for run, text in (("a/plain/seed-0", "one\n"), ("a/sdpa/seed-0", "two\n")):
        (study / "runs" / run).mkdir(parents=True)
        (study / "runs" / run / "record.jsonl").write_text(text)
        (study / "runs" / run / "checkpoint.safetensors").write_bytes(b"large")
    command = "tilewise study run a --out '/my place' --jobs 2"
    (study / "study.json").write_text(json.dumps({"command": command, "hash": "abc"}))
    (study / "floors.json").write_text('{"a": []}')
    for name in ("report.md", "report.html"):
        (study / name).write_text(f"before\n{command}\nafter")
    script = ROOT / "scripts" / "store_study.py"
    for target in ("first", "second"):
        ran(sys.executable, script, study, tmp_path / target)
    first, second = (tmp_path / each / "records.tar.gz" for each in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert (tmp_path / "first" / "floors.json").read_text() == '{"a": []}'
    assert {path.name for path in (tmp_path / "first").iterdir()} == {
        "floors.json",
        "records.tar.gz",
        "report.md",
        "study.json",
    }
    record = json.loads((tmp_path / "first" / "study.json").read_text())
    assert record == {"command": "tilewise study run a --jobs 2", "hash": "abc"}
    report = (tmp_path / "first" / "report.md").read_text()
    assert report == "before\ntilewise study run a --jobs 2\nafter"
    with tarfile.open(first) as archive:
        files = [archive.extractfile(name) for name in archive.getnames()]
        texts = dict(zip(archive.getnames(), [file.read() for file in files if file], strict=True))
    assert texts == {
        "runs/a/plain/seed-0/record.jsonl": b"one\n",
        "runs/a/sdpa/seed-0/record.jsonl": b"two\n",
    }


def test_what_is_no_study_is_not_stored(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "store_study.py"
    done = ran(sys.executable, script, tmp_path, tmp_path / "stored", status=1)
    assert "STUDY_FOLDER" in done.stderr
    assert not (tmp_path / "stored").exists()


ESSENTIAL = "not slow and not thorough"
# A Python in whose place a shell script stands: it writes down the calls of pytest, and answers
# each with the exit code that it is told to.
STAND_IN = """\
#!/bin/sh
case "$*" in
  *cpu_count*) echo 3; exit 0 ;;
  -c*) exit "$NO_TRITON" ;;
esac
part=${TILEWISE_PART:+ of part $TILEWISE_PART}
printf '%s %s%s\\n' "${TRITON_INTERPRET:-0}" "$*" "$part" >>"$CALLS"
if [ "${TRITON_INTERPRET:-0}" = 1 ]; then echo interpreted; exit "$INTERPRETED"; fi
echo ordinary
exit "$ORDINARY"
"""


@pytest.mark.parametrize(
    ("ordinary", "interpreted", "code"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (5, 0, 0), (0, 5, 0), (1, 5, 1), (5, 1, 1), (5, 5, 5)],
)
def test_tests_run_in_two_processes(
    tmp_path: Path, ordinary: int, interpreted: int, code: int
) -> None:
    """The interpreter's with the same arguments; 5, which is nothing collected, is no failure."""
    calls, said, done = _test(tmp_path, ordinary, interpreted)
    assert calls == [f"{way} -m pytest -m {ESSENTIAL} -k a b" for way in (0, 1)]
    assert [word for word in said if word in ("ordinary", "interpreted")] == [
        "ordinary",
        "interpreted",
    ]
    assert done == code


@pytest.mark.parametrize("ordinary", [0, 1, 5])
def test_tests_without_triton(tmp_path: Path, ordinary: int) -> None:
    calls, said, done = _test(tmp_path, ordinary, 0, no_triton=1)
    assert len(calls) == 1
    assert (said, done) == (["ordinary"], ordinary)


def test_tests_that_are_interrupted(tmp_path: Path) -> None:
    """Or called wrongly: the interpreter's do not run."""
    _, said, done = _test(tmp_path, 2, 0)
    assert (said, done) == (["ordinary"], 2)


@pytest.mark.parametrize(
    ("arguments", "tier", "part"),
    [((), ESSENTIAL, ""), (("--all",), "not slow", ""), (("--part", "2/3"), "not slow", "2/3")],
    ids=["essential", "all", "part"],
)
def test_whole_tiers_run_in_a_process_a_core(
    tmp_path: Path, arguments: tuple[str, ...], tier: str, part: str
) -> None:
    calls, said, done = _test(tmp_path, 0, 0, arguments=arguments)
    # At the same time, so that either may be first; the output is in order.
    end = f"-m {tier} -q -n 3 --dist loadfile{part and ' of part '}{part}"
    assert sorted(calls) == [f"{way} -m pytest {end}" for way in (0, 1)]
    assert [word for word in said if word in ("ordinary", "interpreted")] == [
        "ordinary",
        "interpreted",
    ]
    assert done == 0


def test_all_of_what_arguments_choose(tmp_path: Path) -> None:
    calls, _, _ = _test(tmp_path, 0, 0, arguments=("--all", "-k", "a b"))
    assert calls == [f"{way} -m pytest -m not slow -k a b" for way in (0, 1)]


def _test(
    folder: Path,
    ordinary: int,
    interpreted: int,
    no_triton: int = 0,
    arguments: tuple[str, ...] = ("-k", "a b"),
) -> tuple[list[str], list[str], int]:
    """The calls that scripts/test.sh makes where they end so, what it prints, and how it ends."""
    python, calls = folder / "python", folder / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "test.sh", python, *arguments],
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",  # a caller's own does not reach the ordinary process
            "TILEWISE_PART": "9/9",  # nor does this: only --part says it
            "CALLS": str(calls),
            "ORDINARY": str(ordinary),
            "INTERPRETED": str(interpreted),
            "NO_TRITON": str(no_triton),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return calls.read_text().splitlines(), done.stdout.splitlines(), done.returncode


# ---- scripts/bench_sparse.py: what is measured, what is fitted, and how it is shown.


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
    done = ran(sys.executable, SCRIPT, "--from", stored, "--json", tmp_path / "again.json")
    assert "| a pattern |" in done.stdout
    assert json.loads((tmp_path / "again.json").read_text()) == record
