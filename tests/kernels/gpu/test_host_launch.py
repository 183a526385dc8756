"""Launches as on a GPU, with a stub in the place of the driver: what the interpreter cannot see.

Types of arguments, tuples, constants, the keys of Triton's caches, the code of the launcher, and
shared memory beyond what the chip has: all that a first call on a GPU would stumble over.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.gpu.launching import CHIP
from tilewise.kernels.gpu.config import UNPROVEN, Blocks
from tilewise.plan.tuned import Entry, Place, Tuned, installed_triton, write

ROOT = Path(__file__).resolve().parents[3]
HEADER = Path(sysconfig.get_paths(scheme="posix_prefix")["include"]) / "Python.h"

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        shutil.which("gcc") is None or not HEADER.exists(),
        reason="Triton's launcher is compiled with gcc and Python.h, and they are not here",
    ),
]


def launched(
    folder: Path, way: str, *names: str, blocks: str = "off", family: str = "sm_90"
) -> list[dict[str, Any]]:
    """What a process of its own launched; ``blocks`` is its file of measured blocks."""
    hidden = ("TRITON_INTERPRET", "LD_LIBRARY_PATH")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TILEWISE_TUNED": blocks,
        "STUB_FAMILY": family,
    }
    module = "tests.kernels.gpu.launching"
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), way, *names],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kind_of_argument_arrives(tmp_path: Path) -> None:
    """Tuples are taken apart; ones, None and constants are not sent."""
    (said,) = launched(tmp_path, "arguments")
    assert said["grid"] == [5, 4, 1]
    assert said["threads"] == 128
    address, words = said["address"], said["words"]
    assert words[0] == address
    assert words[1] & 0xFFFFFFFF == 48
    assert words[2:4] == [address + 2, address + 16]
    assert words[4] & 0xFFFFFFFF == 3
    assert struct.pack("<I", words[5] & 0xFFFFFFFF) == struct.pack("<f", 0.5)
    assert words[6] & 0xFF == 1


def check_cases(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each["launches"] == 1, each
        assert each["grid"] == each["expected"], each
        assert each["threads"] == 32 * each["warps"], each


@pytest.mark.thorough
def test_cases_of_the_gate(tmp_path: Path) -> None:
    """A sample: tuples of strides, captured tensors, no lists of tiles, one kernel of each pass."""
    names = ("forward D64 causal", "backward D64 head bias", "loss bfloat16 with options",
             "forward D128 causal", "fused D128 causal", "grouped8 D128 full fp8")  # fmt: skip
    said = launched(tmp_path, "cases", *names)
    kernels = [each["name"].partition(" / ")[2] for each in said]
    passes = ["row_kernel", "keys_in_groups", "query_kernel", "line_kernel", "fold_kernel"]
    eight = ["transpose_kernel", "attend_in_groups"]
    fused = ["row_kernel", "keys_in_groups", "narrow_kernel"]
    assert sorted(kernels) == sorted(
        ["attend", *passes, "cross_entropy_kernel", "attend_in_groups", *fused, *eight]
    )
    check_cases(said)


@pytest.mark.thorough
def test_a_case_of_blackwell(tmp_path: Path) -> None:
    """A kernel in groups of warps with tensor memory, and its descriptors."""
    (said,) = launched(tmp_path, "cases", "grouped D128 causal", family="sm_100")
    assert said["name"].endswith("attend_in_groups")
    check_cases([said])


@pytest.mark.thorough
def test_a_problem_by_the_public_call(tmp_path: Path) -> None:
    """The engine's own way to the launches, for odd sizes."""
    (said,) = launched(tmp_path, "problems", "bfloat16 varlen")
    assert said["launches"] == 4


@pytest.mark.slow
def test_every_case_of_the_gate(tmp_path: Path) -> None:
    said = launched(tmp_path, "cases")
    assert len(said) > 80
    check_cases(said)


@pytest.mark.slow
def test_every_problem_of_the_check(tmp_path: Path) -> None:
    """What the accuracy step of ``scripts/gpu_check.py`` calls is launched, whatever it is."""
    said = launched(tmp_path, "problems")
    assert len(said) > 55
    assert all(each["launches"] >= 3 for each in said if "no rows" not in each["name"])


def check_replays(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each["same"], each
        assert each["replayed"] <= each["launches"], each


@pytest.mark.thorough
def test_a_call_is_replayed(tmp_path: Path) -> None:
    """With other tensors, kernels get the arguments that the host code would give them."""
    names = (
        "bfloat16 causal D64",
        "bfloat16 varlen",
        "bfloat16 one row, long keys",
        "bfloat16 layout of tiles",
        "bfloat16 table of tiles",
        "float8 full",
    )
    said = launched(tmp_path, "replays", *names)
    check_replays(said)
    assert {each["name"] for each in said} == set(names)
    assert all(each["replayed"] for each in said)


@pytest.mark.thorough
def test_a_measured_file_is_the_switch_of_the_fused_backward(tmp_path: Path) -> None:
    """A public call takes three kernels for its backward in place of four, and so does a replay."""
    table = {64: Blocks(64, 128, 8, 2), 128: Blocks(64, 128, 8, 3)}
    entries = [
        Entry(Place("fused", torch.bfloat16, width, "plain"), UNPROVEN["fused", "sm_90", width],
              1.0, 0.0, table[width], 1.2, 0.0)
        for width in table
    ]  # fmt: skip
    versions = torch.__version__, installed_triton()
    file = tmp_path / "measured.json"
    write(file, Tuned(CHIP, "sm_90", *versions, "2026-11-29", tuple(entries)))
    names = ("bfloat16 causal D64", "bfloat16 sinks", "bfloat16 full D128")
    said = launched(tmp_path, "replays", *names, blocks=str(file))
    check_replays(said)
    kernels = [each["kernels"] for each in said]
    assert len(kernels) == 3
    for each in kernels:
        assert [each.count(name) for name in ("keys_in_groups", "narrow_kernel")] == [1, 1]
        assert "query_kernel" not in each


@pytest.mark.slow
def test_every_problem_is_replayed(tmp_path: Path) -> None:
    """Of all calls only those whose host code makes tensors of its own go through it again."""
    said = launched(tmp_path, "replays")
    check_replays(said)
    assert sum(each["replayed"] > 0 for each in said) > 30
