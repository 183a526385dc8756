"""The signatures of other attention libraries over tilewise's own calls.

Nothing is patched or renamed by an import; ``install`` is asked for by name, and undone by
``uninstall``.
"""

from tilewise.compat.stand_in import install, uninstall

__all__ = ["install", "uninstall"]
