"""The chips to compile for: the families of ``config.py`` as the compilers name them."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.inspect.gpu import FAMILIES, Family

__all__ = ["TARGETS", "Target", "target_named"]

# Families whose code runs on this very chip only: Triton compiles for the letter.
_EXACT = ("sm_90", "sm_100", "sm_120")
_WHY_NOT = {
    "sm_75": "Triton makes no matrix instructions for it: products become scalar code on local "
    "memory",
}


class Target(NamedTuple):
    """One chip family.

    Args:
        name: as the makers' compilers say it.
        family: its row in ``config.FAMILIES``.
        why_not: why Triton has no good code for it; empty where it has.
    """

    name: str
    family: Family
    why_not: str = ""

    @property
    def arch(self) -> int | str:
        """Triton's name of the chip: a number for NVIDIA, the name for AMD."""
        return int(self.family.name[3:]) if self.family.maker == "cuda" else self.family.name


TARGETS = tuple(
    Target(name + "a" * (name in _EXACT), family, _WHY_NOT.get(name, ""))
    for name, family in FAMILIES.items()
    if family.maker
)


def target_named(name: str) -> Target:
    """Return the target of this name.

    Raises:
        KeyError: there is none.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise KeyError(name)
