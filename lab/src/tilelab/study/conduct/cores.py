"""Choose the core that a run is pinned to, so that runs do not measure each other.

Every study would begin with the first core. So a study locks a file for each core that it pins to,
and has the core alone for as long as it lasts. The system gives the lock back with the process,
however that ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tilewise.folders import NotPrivate, private_folder, runtime_folder

__all__ = ["Cores", "lock_folder"]


def lock_folder() -> Path:
    """Return the folder in which the studies of this user on this machine find their locks."""
    return runtime_folder() / "cores"


class Cores:
    """The cores of this machine that a study pins its runs to, until ``close``.

    Args:
        processors: the number of one of each core, in order of choice; empty for no pinning.
        folder: of the locks; made if need be. It must be this user's alone. Where it is not, or
            cannot be written, ``trouble`` says so and other studies are not seen.
    """

    def __init__(self, processors: Sequence[int], folder: Path) -> None:
        self._processors = tuple(processors)
        self._folder: Path | None = None
        self.trouble = ""
        if self._processors:
            try:
                self._folder = private_folder(folder)
            except OSError as error:
                self._give_up(folder, error)
        self._own: set[int] = set()
        self._files = ExitStack()
        self.close = self._files.close

    def choose(self, used: Sequence[int | None]) -> int | None:
        """Choose the core of the next run: one without a run, else the one with the fewest.

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
        """Claim a core for this study if it is free; return whether the study has it."""
        if core not in self._own:
            file = self._open(core)
            if file is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(file)
                    return False
                self._files.callback(os.close, file)
            self._own.add(core)
        return True

    def _open(self, core: int) -> int | None:
        """Open the lock of a core; None where there are no locks."""
        if self._folder is None:
            return None
        path = self._folder / str(core)
        # Not through a link, and without waiting for whoever reads from a FIFO.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o600)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise NotPrivate(f"{path} is no regular file")
        except OSError as error:
            self._give_up(path, error)
            return None
        return file

    def _give_up(self, path: Path, error: OSError) -> None:
        self._folder = None
        why = str(error) if isinstance(error, NotPrivate) else f"{path}: {error.strerror}"
        self.trouble = (
            f"Other studies on this machine are not seen, so two runs may share a core: {why}. "
            "Remove what is there, or set XDG_RUNTIME_DIR to a folder of mode 700 that you own."
        )
