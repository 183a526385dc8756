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
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # A torn last line is cut off before the next one is written.
        self._offset = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """Return the new whole lines, parsed; what is no event is left to the record's reader."""
        try:
            size = self._path.stat().st_size
            if size <= self._offset:
                self._offset = size  # less, where the file was cut off meanwhile
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
