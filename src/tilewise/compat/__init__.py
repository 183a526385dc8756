"""Floor 9: the signatures of other attention libraries over tilewise's own calls.

Nothing is patched or renamed by an import; ``install`` is asked for by name, and undone by
``uninstall``.
"""

from __future__ import annotations

__all__ = ["install", "uninstall"]


def install(name: str) -> None:
    """Make ``import <name>`` find tilewise's module of that name: see ``stand_in.install``."""
    from tilewise.compat.stand_in import install as install_named

    install_named(name)


def uninstall(name: str) -> None:
    """Undo ``install``: see ``stand_in.uninstall``."""
    from tilewise.compat.stand_in import uninstall as uninstall_named

    uninstall_named(name)
