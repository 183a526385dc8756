"""Checked mode: whether a call looks at every index of a mask or score before it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CHECKED = ContextVar("tilewise_checked", default=os.environ.get("TILEWISE_CHECKED") == "1")


@contextmanager
def checked() -> Iterator[None]:
    """Raise an error for an index outside its tensor at a pair that attends.

    Without it, such an index reads the nearest element. Inside the block, each eager call of
    attention first evaluates the indices of its mask and score for all pairs, in plain torch.
    ``TILEWISE_CHECKED=1`` in the environment does this everywhere. Use it to find mistakes, not for
    speed.
    """
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def is_checked() -> bool:
    """Return whether the caller is in checked mode."""
    return _CHECKED.get()
