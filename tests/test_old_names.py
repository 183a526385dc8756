"""The lab's old name: modules that studies of one's own import from ``tilewise.lab``."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

NAMES = {
    "tilewise.lab.study.config": "tilelab.study.ask.config",
    "tilewise.lab.study.recipes.arms": "tilelab.study.recipes.arms",
    "tilewise.lab.study.track.tracker": "tilelab.study.track.tracker",
    "tilewise.lab.models.gpt2": "tilelab.models.gpt2",
}


@pytest.mark.parametrize("old", NAMES)
def test_an_old_name_warns_and_is_the_same_module(old: str) -> None:
    new = import_module(NAMES[old])
    spec = new.__spec__
    for name in [each for each in sys.modules if each.startswith("tilewise.lab.")]:
        del sys.modules[name]
    with pytest.warns(DeprecationWarning, match=f"{old} is now {NAMES[old]}"):
        assert import_module(old) is new
    assert new.__spec__ is spec


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tilewise\.lab\.nothing"):
        import_module("tilewise.lab.nothing")
