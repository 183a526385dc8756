"""Which core a run is pinned to, so that runs do not measure each other.

Every study would begin with the first core. So a core that a study pins to is the study's alone for
as long as it lasts: it holds the lock of a file, which the system gives back with the process,
however that ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

__all__ = ["Cores", "lock_folder"]


def lock_folder() -> Path:
    """Where the studies of this user on this machine find each other's locks."""
    return Path(tempfile.gettempdir()) / f"tilewise-cores-{os.getuid()}"


class Cores:
    """The cores of this machine that a study pins its runs to, until ``close``.

    Args:
        processors: the number of one of each core, in order of choice; empty for no pinning.
        folder: of the locks; made if need be. Where it cannot be written, other studies are not
            seen.
    """

    def __init__(self, processors: Sequence[int], folder: Path) -> None:
        self._processors, self._folder = tuple(processors), folder
        self._own: set[int] = set()
        self._files = ExitStack()
        self.close = self._files.close

    def choose(self, used: Sequence[int | None]) -> int | None:
        """Where the next run goes: to a core without a run, else to the one with the fewest.

        None where cores are left that are other studies': the system finds a place for the run.

        Args:
            used: where this study's runs are.
        """
        for each in sorted(self._processors, key=lambda core: core not in self._own):
            if each not in used and self._take(each):
                return each
        if not self._own or len(self._own) < len(self._processors):
            return None
        return min(self._processors, key=used.count)

    def _take(self, core: int) -> bool:
        """Whether it is this study's, perhaps from now on."""
        if core not in self._own:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                file = (self._folder / str(core)).open("a")
            except OSError:
                file = None
            if file is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.close()
                    return False
                self._files.enter_context(file)
            self._own.add(core)
        return True
