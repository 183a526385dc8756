"""diffusers' own tests of attention backends, over tilewise.

Its source archive has no tests. ``DIFFUSERS_SOURCE`` names a checkout of its repository, at the tag
of the version that .ci/diffusers.txt installs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, ran

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("diffusers", "accelerate")),
        reason="needs diffusers: pip install --no-deps -r .ci/diffusers.txt",
    ),
    pytest.mark.skipif(
        "DIFFUSERS_SOURCE" not in os.environ,
        reason="DIFFUSERS_SOURCE names no checkout of diffusers",
    ),
]
MODELS = ("flux", "hunyuan_video", "ltx", "qwenimage", "wan")
TESTS = 4  # of each model: outputs, compiled outputs, and two ways to set a backend


def test_its_own_tests_of_backends_pass() -> None:
    folder = "tests/models/transformers"
    files = [f"{folder}/test_models_transformer_{name}.py" for name in MODELS]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "diffusers_suite"]
    command += ["-p", "no:cacheprovider", "--tb=short", *files]
    paths = [str(HERE), *(path for path in sys.path if path and Path(path) != ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "DIFFUSERS_TEST_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    done = ran(*command, timeout=None, cwd=os.environ["DIFFUSERS_SOURCE"], env=environment)
    last = done.stdout.splitlines()[-1]
    passed = re.match(r"(\d+) passed", last)
    assert passed is not None, done.stdout[-4000:]
    assert int(passed[1]) >= TESTS * len(MODELS), done.stdout[-4000:]
    assert "skipped" not in last, done.stdout[-4000:]
