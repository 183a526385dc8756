"""``install``: tilewise's module under the name of a package that is absent, and its metadata.

A finder on ``sys.meta_path`` answers for the package's modules and for its distribution, so that
``import flash_attn``, ``importlib.util.find_spec`` and ``importlib.metadata.version`` all find it.
Modules made this way hold the public names of tilewise's modules; nothing else is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module, invalidate_caches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from os import PathLike
from types import ModuleType
from typing import NoReturn

from tilewise.compat.stand_in_version import FLASH_ATTN_VERSION
from tilewise.errors import InvalidArgument, Unsupported

__all__ = ["install", "installed", "uninstall"]


_HERE = "tilewise.compat.flash_attn"
_PACKAGE, _DISTRIBUTION = "flash_attn", "flash-attn"
_NOTE = "tilewise standing in for flash-attn (tilewise.compat.install)"  # the summary
# Its modules, each with tilewise's whose public names it has; "" for none.
_MODULES = {
    "flash_attn": _HERE,
    "flash_attn.flash_attn_interface": f"{_HERE}.flash_attn_interface",
    "flash_attn.bert_padding": f"{_HERE}.bert_padding",
    "flash_attn.layers": "",
    "flash_attn.layers.rotary": f"{_HERE}.layers.rotary",
    "flash_attn.ops": "",
    "flash_attn.ops.triton": "",
    "flash_attn.ops.triton.rotary": f"{_HERE}.layers.rotary",
}


def install(name: str) -> None:
    """Make ``import <name>`` find tilewise's module with that package's interface.

    A second call changes nothing. Code that was imported before and found the package missing
    does not look again: install first.

    Args:
        name: ``"flash_attn"``: its functions, ``flash_attn_interface``, ``bert_padding`` and
            ``layers.rotary``, and the distribution ``flash-attn`` in the version whose interface
            they have.

    Raises:
        InvalidArgument: no package of that name can be stood in for.
        Unsupported: the package itself is installed.
    """
    _check(name)
    if installed(name):
        return
    if name in sys.modules or find_spec(name) is not None:
        raise Unsupported(
            f"{name} itself is installed here: tilewise does not take its place",
            fix=f"import tilewise.compat.{name} under that name, or uninstall "
            f"{_DISTRIBUTION} first",
        )
    sys.meta_path.append(_Finder())
    invalidate_caches()


def uninstall(name: str) -> None:
    """Undo ``install``: the name is free again. Objects that were imported stay what they are.

    Raises:
        InvalidArgument: no package of that name can be stood in for, or it is not installed.
    """
    _check(name)
    finders = [each for each in sys.meta_path if isinstance(each, _Finder)]
    if not finders:
        raise InvalidArgument("name", f"{name!r}, which is not installed", "one that is")
    for finder in finders:
        sys.meta_path.remove(finder)
    for module in _MODULES:
        sys.modules.pop(module, None)
    invalidate_caches()


def installed(name: str) -> bool:
    """Return whether tilewise stands in for the package."""
    return name == _PACKAGE and any(isinstance(each, _Finder) for each in sys.meta_path)


def _check(name: str) -> None:
    if name != _PACKAGE:
        raise InvalidArgument("name", repr(name), f"one of {_PACKAGE!r}")


class _Finder(MetaPathFinder):
    """Answers for the package's modules and for its distribution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of its modules, else None."""
        source = _MODULES.get(fullname)
        if source is None:
            return None
        within = any(other.startswith(fullname + ".") for other in _MODULES)
        return ModuleSpec(fullname, _Names(source), origin=source or None, is_package=within)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Yield its distribution if a search is for that or for everything."""
        wanted = None if context is None else context.name
        if wanted is None or wanted.replace("_", "-").lower() == _DISTRIBUTION:
            yield _StandIn()


class _Names(Loader):
    """Gives a new module the public names of one of tilewise's."""

    def __init__(self, source: str) -> None:
        self._source = source

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names; a module without a source stays empty."""
        if not self._source:
            return
        source = import_module(self._source)
        module.__doc__ = source.__doc__
        for name in source.__all__:
            setattr(module, name, getattr(source, name))


class _StandIn(Distribution):
    """The metadata of the package."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA and top_level.txt; None for any other file."""
        if filename == "METADATA":
            # Nothing is imported for it: whatever reads entry points reads this, also while the
            # modules themselves are being imported.
            return (
                f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\n"
                f"Version: {FLASH_ATTN_VERSION}\nSummary: {_NOTE}\n"
            )
        return f"{_PACKAGE}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> NoReturn:
        """There are no files."""
        raise FileNotFoundError(f"{_NOTE} has no file {path}")
