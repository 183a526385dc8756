"""Reads a record while another process writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["Follower"]


class Follower:
    """The events that were appended since the last look; for showing, not for deciding.

    Args:
        path: of the record; it need not be there yet.
        from_start: whether to begin with what is there already.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = 0 if from_start or not path.exists() else path.stat().st_size

    def new(self) -> list[dict[str, Any]]:
        """The new whole lines, parsed; what is no event is left to the reader of the record."""
        try:
            size = self._path.stat().st_size
            if size <= self._offset:
                # A torn last line was cut off: what comes next begins at the new end.
                self._offset = min(size, self._offset)
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [found for line in whole.splitlines() if (found := _parsed(line))]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "event" in values else None
