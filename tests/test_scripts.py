"""The scripts that build the core in other ways: sanitizers here, and aarch64 under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
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
