"""The package xformers beside ours: its bias classes in our calls, and its own tests over them.

Its compiled kernels are not needed, and do not load beside torch for the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.compat.test_xformers import of
from tests.compat.xformers_cases import CASES, PAGE, TABLE, Case
from tests.conftest import ROOT, ran
from tests.contract import assert_same_bits
from tilewise.compat import xformers as ours
from tilewise.compat.xformers import attn_bias

HERE = Path(__file__).parent
SOURCE = ROOT / "build" / "integrations" / "xformers-source" / "tests"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xformers") is None,
    reason="needs xformers: bash .ci/run integrations",
)
# Of xformers' tests those that say device="cpu", or whose operators do: the others are of its
# kernels for GPUs, and of how it chooses among them.
OWN = (
    "test_forward[ or test_logsumexp[ or test_backward[ or test_lowlevel_api_shapes or test_empty"
    " or test_grad_checkpointing or test_custom_scale or (test_attn_bias and not padded)"
    " or test_local_attn_bias or test_window_size"
)


@pytest.fixture(name="theirs")
def _theirs() -> Any:
    return import_module("xformers.ops.fmha.attn_bias")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_its_biases_are_taken_as_they_are(case: Case, theirs: Any) -> None:
    q, k, v, _ = of(case)
    its, own = case.make(theirs), case.make(attn_bias)
    assert type(its).__module__ == "xformers.ops.fmha.attn_bias"
    for wanted in (False, True):
        q.requires_grad_(wanted)
        found = ours.memory_efficient_attention(q, k, v, its)
        expected = ours.memory_efficient_attention(q, k, v, own)
        assert_same_bits(found.detach(), expected.detach(), case.name)
    rows, keys = case.seen().shape
    # Of pages it counts the keys of all sequences' pages, and answers with those that there are.
    places = PAGE * sum(map(len, TABLE)) if "Paged" in case.name else keys
    expected = its.materialize((1, 1, rows, places))
    assert_same_bits(own.materialize((1, 1, rows, keys)), expected, "materialize")


def test_its_own_tests_pass(tmp_path: Path) -> None:
    if not SOURCE.exists():
        pytest.skip("needs xformers' source: bash .ci/run integrations")
    place = tmp_path / "theirs"
    place.mkdir()
    (place / "__init__.py").touch()
    (place / "utils.py").symlink_to(HERE / "xformers_utils.py")
    (place / "test_own.py").symlink_to(SOURCE / "test_mem_eff_attention.py")
    folders = [str(HERE), *(path for path in sys.path if path)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xformers_suite", "-k", OWN]
    command += ["-p", "no:cacheprovider", "--tb=short", "theirs"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = ran(*command, timeout=None, cwd=tmp_path, env=environment)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 2000, done.stdout[-4000:]
