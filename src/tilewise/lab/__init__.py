"""The old name of the package ``tilelab``: an import from here warns and gives the new module."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# What has another place within tilelab too, of the modules that the documentation named.
_MOVED = {
    "study.config": "study.ask.config",
    "study.designs": "study.ask.designs",
    "study.metrics": "study.ask.metrics",
    "study.overrides": "study.ask.overrides",
    "study.records": "study.records.events",
    "study.run": "study.ask.run",
    "study.store": "study.records.store",
    "study.choices.registry": "study.ask.values",
}


class _Old(MetaPathFinder):
    """Finds a module under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        name = fullname.removeprefix(__name__ + ".")
        new = f"tilelab.{_MOVED.get(name, name)}"
        found = find_spec(new)
        if found is None:
            return None
        if found.submodule_search_locations is None:  # one warning an import, for its last part
            warnings.warn(
                f"{fullname} is now {new}; the old name goes with the next version",
                DeprecationWarning,
                stacklevel=2,
            )
        return ModuleSpec(fullname, _New(new), is_package=True)


class _New(Loader):
    """Gives the module of the new name, as it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import of the old name has put its own there


sys.meta_path.insert(0, _Old())  # before the one that would load a second copy from the files
