"""The command as a user calls it: the self-test, small with the reference and whole with Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT, ran
from tilelab.gpu_check.worker import STEPS

SCRIPT = str(ROOT / "scripts" / "gpu_check.py")
# What the lab and the tests have, and a bare GPU machine has not.
MISSING = (
    *("tilewise._core", "pydantic", "rich", "scipy", "matplotlib", "jinja2", "safetensors"),
    *("schedulefree", "tokenizers", "hypothesis", "pytest", "triton"),
)


def call(*arguments: str, out: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """The script, from another folder and without a path to the package."""
    hidden = ("PYTHONPATH", "TRITON_INTERPRET", "OUT")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    words = (sys.executable, SCRIPT, "--self-test", "--out", out, *arguments)
    return ran(*words, status=status, timeout=None, cwd=out.parent, env=environment)


def test_some_steps_of_the_self_test(tmp_path: Path) -> None:
    steps = ("smoke", "ceilings", "host")
    done = call("--backend", "tiled", "--only", *steps, out=tmp_path / "out")
    values = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert {row["step"] for row in values["rows"]} == set(steps)
    assert values["status"] == "only smoke, ceilings, host"
    text = (tmp_path / "out" / "gpu_check.txt").read_text()
    assert done.stdout == text
    assert "no number is a measurement" in text
    assert done.stderr == ""


def test_nothing_else_is_imported() -> None:
    """Every module, where only torch and numpy are installed; Triton belongs to the backend."""
    names = []
    for part in ("gpu_check", "tune"):
        found = (ROOT / "lab" / "src" / "tilelab" / part).glob("*.py")
        names += [f"tilelab.{part}.{path.stem}" for path in found]
    names.remove("tilelab.tune.worker")  # it begins with Triton; its self-test runs without these
    assert "tilelab.gpu_check.speed" in names
    assert "tilelab.tune.half_hour" in names
    code = (
        f"import sys, importlib\nfor name in {MISSING}: sys.modules[name] = None\n"
        f"for name in {names}: importlib.import_module(name)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'lab' / 'src'}"}
    ran(sys.executable, "-c", code, env=environment)


@pytest.mark.thorough
def test_what_fails_ends_with_1(tmp_path: Path) -> None:
    done = call("--backend", "unknown", "--only", "smoke", out=tmp_path / "out", status=1)
    assert "ERROR smoke, first call: InvalidArgument" in done.stdout
    assert "1 ok, 1 error" in done.stdout, "the machine is known all the same"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tiled", "gpu"])
def test_the_whole_self_test(backend: str, tmp_path: Path) -> None:
    """Every step and every job; with "gpu" all kernels run in Triton's interpreter."""
    if backend == "gpu" and find_spec("triton") is None:
        pytest.skip("Triton is not installed (pip install triton)")
    call("--backend", backend, out=tmp_path / "out")
    values = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert values["status"] == "complete"
    assert {row["step"] for row in values["rows"]} == {step.name for step in STEPS}
    declined = [row for row in values["rows"] if row["status"] == "unsupported"]
    assert all("fp8" in row["name"] or "float8" in row["note"] for row in declined), declined
