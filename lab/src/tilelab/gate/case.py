"""A case: the launches of a pass on a chip, made on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from tilewise.inspect.gpu import Launch

__all__ = ["Case", "cases_of"]


class Case(NamedTuple):
    """The launches of a pass.

    Args:
        name: short, unique.
        launches: from a chip family ("sm_90", "gfx942") to the launches.
        sixteen_bit: the products are of types of 16 bits or 8, so matrix instructions are due.
        without_products: kernels by name that multiply no matrices.
        key: part of the quick run.
        families: only for these families; empty for all.
        described: whole blocks come by tensor descriptors, on families that have them.
    """

    name: str
    launches: Callable[[str], Sequence[Launch]]
    sixteen_bit: bool = True
    without_products: frozenset[str] = frozenset()
    key: bool = False
    families: tuple[str, ...] = ()
    described: bool = False


def cases_of(module: str) -> dict[str, Case]:
    """Return the cases by name that a module lists as ``CASES``."""
    return {case.name: case for case in import_module(module).CASES}
