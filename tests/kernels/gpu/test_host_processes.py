"""Which tests of this folder run in which process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.kernels.gpu import conftest

KERNEL, HOST = Path("test_guard.py"), Path("test_host_processes.py")


@pytest.mark.parametrize(
    ("interpreted", "triton", "kernel", "host"),
    [
        (True, True, None, "does not interpret"),
        (True, False, "Triton is not installed", "does not interpret"),
        (False, True, "a process of its own", None),
        (False, False, "Triton is not installed", None),
    ],
)
def test_modules_and_their_reasons(
    monkeypatch: pytest.MonkeyPatch,
    interpreted: bool,
    triton: bool,
    kernel: str | None,
    host: str | None,
) -> None:
    monkeypatch.setattr(conftest, "INTERPRETED", interpreted)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if triton else None)
    for path, expected in ((KERNEL, kernel), (HOST, host)):
        why = conftest.why_skipped(path)
        assert why is None if expected is None else expected in str(why)


def _pytest(*arguments: str, interpret: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", *arguments],
        env=os.environ | {"TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.thorough
def test_the_ordinary_process_imports_no_kernel() -> None:
    """The modules that hold kernels are skipped, with the reason, and not imported."""
    done = _pytest("tests/kernels/gpu/test_guard.py", interpret="0")
    assert done.returncode == 5
    assert "a process of its own" in done.stdout
    assert "::" not in done.stdout


@pytest.mark.thorough
def test_the_interpreting_process_looks_at_this_folder_only() -> None:
    pytest.importorskip("triton")
    done = _pytest("tests/test_chips.py", "tests/kernels/gpu/test_guard.py", interpret="1")
    assert done.returncode == 0, done.stdout
    collected = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == {"tests/kernels/gpu/test_guard.py"}
    assert "deselected" in done.stdout
