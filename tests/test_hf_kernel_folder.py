"""The Hugging Face kernel's folder, from wheels of several systems: a build for each.

``tests/integrations/test_hf_kernel.py`` loads and calls the one of this environment.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
from scripts import hf_kernel

WHEELS = {
    "cp311-cp311-manylinux_2_28_x86_64": "_core.cpython-311-x86_64-linux-gnu.so",
    "cp312-abi3-manylinux_2_28_x86_64": "_core.abi3.so",
    "cp312-abi3-manylinux_2_27_aarch64": "_core.abi3.so",
    "cp312-abi3-macosx_11_0_arm64": "_core.abi3.so",
    "cp312-abi3-win_amd64": "_core.pyd",
}


def wheel(folder: Path, tag: str, core: str | None) -> Path:
    made = folder / f"tilewise-0.1.0-{tag}.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("tilewise/__init__.py", "")
        if core is not None:
            archive.writestr(f"tilewise/{core}", f"the core of {tag}")
    return made


def test_a_build_for_each_system(tmp_path: Path) -> None:
    """Wheels of one system share a build: a core for each of their Pythons."""
    wheels = [wheel(tmp_path, tag, core) for tag, core in WHEELS.items()]
    builds = hf_kernel.assemble(tmp_path / "kernel", hf_kernel.cores_in(wheels))
    systems = {each.name.split("-cpu-")[1]: each for each in builds}
    assert set(systems) == {"x86_64-linux", "aarch64-linux", "aarch64-darwin", "x86_64-windows"}
    both = {each.name for each in systems["x86_64-linux"].glob("_core.*")}
    assert both == {"_core.cpython-311-x86_64-linux-gnu.so", "_core.abi3.so"}
    assert {each.name for each in systems["x86_64-windows"].glob("_core.*")} == {"_core.pyd"}
    marks = set()
    for build in builds:
        about = json.loads((build / "metadata.json").read_text())
        marks.add(about["id"])
        for module in build.rglob("*.py"):
            assert not re.search(r"^\s*(from|import) tilewise\b", module.read_text(), re.MULTILINE)
    assert len(marks) == len(builds)  # the id names what is in a build


@pytest.mark.parametrize(
    ("tag", "core"),
    [("cp312-abi3-musllinux_1_2_x86_64", "_core.abi3.so"), ("py3-none-win_amd64", None)],
)
def test_a_wheel_that_does_not_serve_is_refused(tag: str, core: str | None, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no wheel of tilewise with a core for a known system"):
        hf_kernel.cores_in([wheel(tmp_path, tag, core)])
