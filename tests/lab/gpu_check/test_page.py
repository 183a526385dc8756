"""docs/gpu.md names every chip, every module of the backend and every step of the check."""

from __future__ import annotations

import re
from pathlib import Path

from tilelab.gpu_check.worker import STEPS
from tilewise.kernels.gpu.config import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
BACKEND = ROOT / "src" / "tilewise" / "kernels" / "gpu"


def test_every_chip_has_its_row() -> None:
    rows = re.findall(
        r"^\| (\w+) \| .* \| (yes|no.*) \| (yes.*|no.*) \| (yes|no.*) \|$", PAGE, re.M
    )
    assert [name for name, *_ in rows] == [each.name for each in FAMILIES.values() if each.maker]


def test_what_is_measured_is_stored() -> None:
    """A chip that the page calls measured has results under benchmarks/."""
    stored = list((ROOT / "benchmarks").glob("*/gpu_check.json"))
    measured = re.findall(r"^\| \w+ \| .* \| yes.* \| yes \|$", PAGE, re.M)
    assert bool(stored) == bool(measured)
    assert ("None is measured so far" in PAGE) == (not stored)


def test_every_step_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \| ", PAGE, re.M)
    assert explained == [step.name for step in STEPS]


def test_every_module_is_there() -> None:
    named = set(re.findall(r"`(\w+)\.py`", PAGE.partition("## A new chip")[0]))
    modules = [path for path in BACKEND.rglob("*.py") if path.parent.name != "gate"]
    assert named == {path.stem for path in modules} - {"__init__"}
