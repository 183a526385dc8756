"""A pytest plugin by which diffusers' own tests of attention backends run tilewise, on the CPU.

The tests of its models draw their cases from one list of backends. Here the list has ``xformers``
alone, which is tilewise. Only these tests run. A model without a class for them is given one.
"""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from typing import Any

import pytest

from tilewise import compat
from tilewise.integrations.diffusers import register
from tilewise.kernels.cpu import backend

compat.install("xformers")  # before diffusers is imported
NO_FORWARD = "test_context_manager_switches_and_restores_backend"
passes = 0  # forward passes of tilewise's kernels in this process


def _count(name: str) -> None:
    kernel = getattr(backend._Kernel, name)

    def counted(*given: Any) -> Any:
        global passes
        passes += 1
        return kernel(*given)

    setattr(backend._Kernel, name, counted)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the tests are collected; ``tests`` is diffusers' folder here."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    register()
    for name in ("forward", "output"):
        _count(name)
    theirs: Any = import_module("tests.models.testing_utils")
    tests = theirs.AttentionBackendTesterMixin
    parameters = import_module("tests.models.testing_utils.attention")._ALL_BACKEND_PARAMS
    parameters[:] = [pytest.param(AttentionBackendName.XFORMERS, id="tilewise")]
    for path in session.config.args:
        module = import_module(path.removesuffix(".py").replace("/", "."))
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
        own = [kind for kind in kinds if kind.__module__ == module.__name__]
        if not any(issubclass(kind, tests) for kind in own):
            config = next(kind for kind in own if issubclass(kind, theirs.BaseModelTesterConfig))
            module.TestTilewise = type("TestTilewise", (config, tests), {})  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other tests of these files out."""
    tests = import_module("tests.models.testing_utils").AttentionBackendTesterMixin
    items[:] = [item for item in items if issubclass(getattr(item, "cls", None) or object, tests)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, None, None]:
    """Fail a test whose model never came to tilewise's kernels."""
    before = passes
    yield
    assert passes > before or item.originalname == NO_FORWARD, "tilewise's kernels did not run"
