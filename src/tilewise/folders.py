"""Floor 0: where tilewise keeps what can be made again: one folder of the user's."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$TILEWISE_CACHE``, or ``tilewise`` in the user's cache folder; it need not be there."""
    own = os.environ.get("TILEWISE_CACHE")
    if own:
        return Path(own)
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "tilewise"
