"""The tests of the GPU kernels, most of them in Triton's interpreter.

Triton decides when it is imported whether it interprets, so those tests have a process of their
own: ``TRITON_INTERPRET=1 pytest``, which collects this folder only (``tests/conftest.py``) and
which ``./run test`` starts after the ordinary one. There each test runs with the interpreter made
faithful (``interpreter.py``) and under guard (``guard.py``), its programs in an order of its own.

Modules named ``test_host_*.py`` need no interpreter (they compile, or look at text and numbers):
they run in the ordinary process only.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import INTERPRETED


def why_skipped(path: Path) -> str | None:
    """Why this process does not run the tests of a module; None if it does."""
    if path.name.startswith("test_host_"):
        return (
            "compiles, does not interpret: runs without TRITON_INTERPRET" if INTERPRETED else None
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'tilewise[gpu]'"
    if not INTERPRETED:
        return "interpreted in a process of its own: TRITON_INTERPRET=1 pytest, or ./run test"
    return None


class _SkippedModule(pytest.Module):
    """A module that is not even imported: it may need a Triton that is not there."""

    def collect(self) -> Any:
        pytest.skip(str(why_skipped(self.path)), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    """Skip a module before it imports Triton."""
    if why_skipped(module_path) is None:
        return None
    return _SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run kernels faithfully and under guard; the guard's ``Watch``."""
    if not INTERPRETED:
        yield None
        return
    from tests.kernels.gpu.guard import guarded
    from tests.kernels.gpu.interpreter import faithful

    with ExitStack() as stack:
        stack.enter_context(faithful())
        yield stack.enter_context(guarded(zlib.crc32(request.node.nodeid.encode())))
