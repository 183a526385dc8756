"""The signatures of other attention libraries over tilewise's own calls.

Nothing is patched or renamed by an import; ``install`` is asked for by name, and undone by
``uninstall``. It puts tilewise's module under the name of a package that is absent, with metadata.
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
from typing import NamedTuple, NoReturn

from tilewise.compat.stand_in_version import (
    FLASH_ATTN_3_VERSION,
    FLASH_ATTN_VERSION,
    XFORMERS_VERSION,
)
from tilewise.errors import InvalidArgument, Unsupported

__all__ = ["install", "uninstall"]

_HERE = "tilewise.compat.flash_attn"
_XFORMERS = "tilewise.compat.xformers"


class _Package(NamedTuple):
    """What is stood in for: its distribution, and its modules with those whose names they have."""

    distribution: str
    version: str
    modules: dict[str, str]  # "" for a module without names


_PACKAGES = {
    "flash_attn": _Package(
        "flash-attn",
        FLASH_ATTN_VERSION,
        {
            "flash_attn": _HERE,
            "flash_attn.flash_attn_interface": f"{_HERE}.flash_attn_interface",
            "flash_attn.bert_padding": f"{_HERE}.bert_padding",
            "flash_attn.layers": "",
            "flash_attn.layers.rotary": f"{_HERE}.layers.rotary",
            "flash_attn.ops": "",
            "flash_attn.ops.triton": "",
            "flash_attn.ops.triton.rotary": f"{_HERE}.layers.rotary",
            "flash_attn.cute": f"{_HERE}.cute",
            "flash_attn.cute.interface": f"{_HERE}.cute",
        },
    ),
    "flash_attn_interface": _Package(
        "flash-attn-3", FLASH_ATTN_3_VERSION, {"flash_attn_interface": f"{_HERE}.version_3"}
    ),
    "xformers": _Package(
        "xformers",
        XFORMERS_VERSION,
        {
            "xformers": _XFORMERS,
            "xformers.ops": _XFORMERS,
            "xformers.ops.fmha": _XFORMERS,
            "xformers.ops.fmha.attn_bias": f"{_XFORMERS}.attn_bias",
        },
    ),
}


def install(name: str) -> None:
    """Make ``import <name>`` find tilewise's module with that package's interface.

    A second call changes nothing. Code that was imported before and found the package missing
    does not look again: install first.

    Args:
        name: ``"flash_attn"``: its functions, ``flash_attn_interface``, ``bert_padding``,
            ``layers.rotary`` and FlashAttention-4's ``cute``, and the distribution ``flash-attn``
            in the version whose interface they have. ``"flash_attn_interface"``: FlashAttention-3.
            ``"xformers"``: the attention of ``xformers.ops`` and ``xformers.ops.fmha``, with its
            biases.

    Raises:
        InvalidArgument: no package of that name can be stood in for.
        Unsupported: the package itself is installed.
    """
    package = _package(name)
    if installed(name):
        return
    if name in sys.modules or find_spec(name) is not None:
        ours = package.modules[name]
        raise Unsupported(
            f"{name} itself is installed here: tilewise does not take its place",
            fix=f"import {ours} under that name, or uninstall {package.distribution} first",
        )
    sys.meta_path.append(_Finder(name))
    invalidate_caches()


def uninstall(name: str) -> None:
    """Undo ``install``: the name is free again. Objects that were imported stay what they are.

    Raises:
        InvalidArgument: no package of that name can be stood in for, or it is not installed.
    """
    package, finders = _package(name), _finders(name)
    if not finders:
        raise InvalidArgument("name", f"{name!r}, which is not installed", "one that is")
    for finder in finders:
        sys.meta_path.remove(finder)
    for module in package.modules:
        sys.modules.pop(module, None)
    invalidate_caches()


def installed(name: str) -> bool:
    """Return whether tilewise stands in for the package."""
    return bool(_finders(name))


def _finders(name: str) -> list[_Finder]:
    return [each for each in sys.meta_path if isinstance(each, _Finder) and each.name == name]


def _package(name: str) -> _Package:
    if name not in _PACKAGES:
        raise InvalidArgument("name", repr(name), f"one of {', '.join(map(repr, _PACKAGES))}")
    return _PACKAGES[name]


class _Finder(MetaPathFinder):
    """Answers for the package's modules and for its distribution."""

    def __init__(self, name: str) -> None:
        self.name, self._package = name, _PACKAGES[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of its modules, else None."""
        modules = self._package.modules
        source = modules.get(fullname)
        if source is None:
            return None
        within = any(other.startswith(fullname + ".") for other in modules)
        loader = _Names(source, frozenset(modules))
        return ModuleSpec(fullname, loader, origin=source or None, is_package=within)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Yield its distribution if a search is for that or for everything."""
        wanted = None if context is None else context.name
        own = self._package.distribution
        if wanted is None or wanted.replace("_", "-").lower() == own:
            yield _StandIn(self.name, own, self._package.version)


class _Names(Loader):
    """Gives a new module the public names of one of tilewise's, and its submodules when asked."""

    def __init__(self, source: str, modules: frozenset[str]) -> None:
        self._source, self._modules = source, modules

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names; a module without a source has none."""

        def submodule(name: str) -> ModuleType:
            whole = f"{module.__name__}.{name}"
            if whole not in self._modules:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return import_module(whole)

        module.__dict__["__getattr__"] = submodule
        if not self._source:
            return
        source = import_module(self._source)
        module.__doc__ = source.__doc__
        for name in source.__all__:
            setattr(module, name, getattr(source, name))


class _StandIn(Distribution):
    """The metadata of a package."""

    def __init__(self, package: str, distribution: str, number: str) -> None:
        self._package, self._distribution, self._number = package, distribution, number

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA and top_level.txt; None for any other file."""
        if filename == "METADATA":
            # Nothing is imported for it: whatever reads entry points reads this, also while the
            # modules themselves are being imported.
            return (
                f"Metadata-Version: 2.1\nName: {self._distribution}\n"
                f"Version: {self._number}\nSummary: {self._note()}\n"
            )
        return f"{self._package}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> NoReturn:
        """There are no files."""
        raise FileNotFoundError(f"{self._note()} has no file {path}")

    def _note(self) -> str:
        return f"tilewise standing in for {self._distribution} (tilewise.compat.install)"
