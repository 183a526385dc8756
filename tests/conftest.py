"""What every test shares: NaN-filled memory, repeatable draws, instruction sets, shared data.

* ``torch.empty`` is filled with NaN, so that reading memory that nobody wrote fails a test
  instead of passing by luck.
* hypothesis draws the same examples every time and has no deadline (the machines are shared).
* Tests of the library have one thread unless they ask for more.
* ``isa`` runs a test once per instruction set that this machine has.
* ``shared_data`` is the folder of data sets beside the checkout; tests that need it skip where
  it is absent.
"""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch  # before the core: the core borrows torch's OpenMP runtime

from tests.tiers import leave_out_other_parts, mark_thorough

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
NO_CORE = "no core"
# Triton's interpreter is on in the whole process or not at all: see tests/kernels/gpu/conftest.py.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
INTERPRETED_FOLDER = ROOT / "tests" / "kernels" / "gpu"

hypothesis.settings.register_profile(
    "tilewise",
    deadline=None,
    derandomize=True,
    # ``isa`` is set up for each test function and not for each drawn example: what we want.
    # How long drawing takes says how loaded or how emulated a machine is: no deadline there either.
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
hypothesis.settings.load_profile("tilewise")


def available_isas() -> list[str]:
    """Instruction sets of this machine, best first; ``[NO_CORE]`` where the core is not built."""
    try:
        import tilewise._core as core
    except ImportError:
        return [NO_CORE]
    return list(core.isa_available())


def ran(
    *command: object, status: int = 0, timeout: float | None = 300, **given: Any
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, run to its end, which must be this status."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=timeout, **given
    )
    assert done.returncode == status, f"{words}:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done


@pytest.fixture(scope="session", autouse=True)
def nan_filled_memory() -> Iterator[None]:
    """Make torch fill the memory of ``torch.empty`` and its kin with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session", autouse=True)
def tilewise_takes_calls() -> None:
    """Calls of other code are computed by tilewise, also where torch is faster."""
    import tilewise

    tilewise.prefer("tilewise")


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread unless a test asks for more: the machines are shared, the problems small."""
    before = torch.get_num_threads()
    if not request.path.is_relative_to(ROOT / "tests" / "lab"):  # studies choose for themselves
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each instruction set in turn; its name."""
    if request.param == NO_CORE:
        pytest.skip("the compiled core is not built: ./run setup says why")
    import tilewise._core as core

    before = core.isa_active()
    core.set_isa(request.param)
    yield request.param
    core.set_isa(before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared data sets, or a skip."""
    folder = Path(os.environ.get("TILEWISE_DATA", SHARED_DATA))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder} (set TILEWISE_DATA to their folder)")
    return folder


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where Triton interprets, look at the tests of the GPU kernels only."""
    folder, path = INTERPRETED_FOLDER, collection_path
    related = path.is_relative_to(folder) or folder.is_relative_to(path)
    return True if INTERPRETED and not related else None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses tests by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; run one process's tests only."""
    mark_thorough(items)
    if part := os.environ.get("TILEWISE_PART"):
        leave_out_other_parts(config, items, part)
    if INTERPRETED:
        kept = [item for item in items if item.path.is_relative_to(INTERPRETED_FOLDER)]
        others = [item for item in items if not item.path.is_relative_to(INTERPRETED_FOLDER)]
        config.hook.pytest_deselected(items=others)
        items[:] = kept
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu"):  # not its keywords: a folder's name is one of them
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Keep what collecting made, a million objects, out of the way of the garbage collector.

    Traces and syntax trees make so many objects that it looks at all of them again and again.
    """
    gc.collect()
    gc.freeze()
