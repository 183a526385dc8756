"""The scripts: the core built in other ways (sanitizers, aarch64), and studies stored small."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

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
    done = subprocess.run(
        ["bash", ROOT / "scripts" / script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, f"{script}:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"


@pytest.mark.slow
def test_the_core_under_sanitizers() -> None:
    """scripts/sanitize.sh, with the tests that go furthest into odd sizes, masks and threads."""
    compiler = _tool("CXX", "g++")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # A compiler that does not have the file answers with its bare name.
    if not os.path.isabs(found):
        pytest.skip(f"{compiler} has no libasan.so (Debian, Ubuntu: apt install libasan8)")
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv, which the sanitized build borrows from: call ./run setup first")
    _run("sanitize.sh", "tests/kernels", "-q", "-k", "not tiled and not memory")


@pytest.mark.slow
def test_the_core_on_aarch64() -> None:
    """scripts/cross_test.sh: the C++ tests, cross-compiled and emulated."""
    _tool("AARCH64_CXX", "aarch64-linux-gnu-g++")
    _tool("AARCH64_RUN", "qemu-aarch64")
    _run("cross_test.sh")


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
        subprocess.run([sys.executable, script, study, tmp_path / target], check=True)
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
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "store_study.py", tmp_path, tmp_path / "stored"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
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
printf '%s %s\\n' "${TRITON_INTERPRET:-0}" "$*" >>"$CALLS"
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
    ("arguments", "tier"), [((), ESSENTIAL), (("--all",), "not slow")], ids=["essential", "all"]
)
def test_whole_tiers_run_in_a_process_a_core(
    tmp_path: Path, arguments: tuple[str, ...], tier: str
) -> None:
    calls, said, done = _test(tmp_path, 0, 0, arguments=arguments)
    # At the same time, so that either may be first; the output is in order.
    assert sorted(calls) == [f"{way} -m pytest -m {tier} -q -n 3 --dist loadfile" for way in (0, 1)]
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
