"""The command of a run as a process, with its processor time and its peak memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

_STARTER = Path(__file__).with_name("starter.py")
_GRACE_S = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")


class _Ended(NamedTuple):
    status: int  # negative for the signal that ended it
    cpu_s: float
    peak_bytes: int


class Command:
    """A command that ``starter.py`` has started.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, words: Sequence[str]) -> None:
        read, write = os.pipe()
        try:
            self._starter = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_STARTER), str(write), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=(write,),
            )
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._report = os.fdopen(read)
        self._ended: _Ended | None = None
        kind, number = (self._report.readline().split() or ["failed", "0"])[:2]
        if kind == "failed":
            self._report.close()
            self._starter.communicate()
            raise OSError(int(number), os.strerror(int(number)))
        self._process = int(number)

    @property
    def stdout(self) -> IO[bytes]:
        """What the command prints."""
        assert self._starter.stdout is not None
        return self._starter.stdout

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the command runs."""
        if self._ended is None and (code := self._starter.poll()) is not None:
            with self._report:
                said = self._report.readline().split()
            if said:
                self._ended = _Ended(int(said[1]), float(said[2]), int(said[3]))
            else:  # somebody has killed the starter
                with suppress(ProcessLookupError):
                    os.kill(self._process, signal.SIGKILL)
                self._ended = _Ended(code, 0.0, 0)
        return None if self._ended is None else self._ended.status

    def wait(self) -> int:
        """Wait for the end; return the exit status as ``poll`` does."""
        self._starter.wait()
        status = self.poll()
        assert status is not None
        return status

    def end(self) -> None:
        """End the command if it is still there: ask it first, and kill it after five seconds."""
        if self.poll() is None:
            self._starter.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._starter.wait(_GRACE_S)
            self._starter.terminate()
            self.wait()

    def cpu_s(self) -> float:
        """Return CPU seconds of the command and of what it waited for.

        Before its end they are known on Linux alone; elsewhere they are 0 until then.
        """
        self.poll()
        if self._ended is not None:
            return self._ended.cpu_s
        with suppress(OSError):
            fields = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                return sum(int(each) for each in fields[11:15]) / _TICKS
        if sys.platform == "linux":  # it is over, and about to be reported: finer than by ticks
            self.wait()
        return 0.0 if self._ended is None else self._ended.cpu_s

    def peak_bytes(self) -> int:
        """Return the peak memory of the largest process of a command that is over."""
        self.poll()
        return 0 if self._ended is None else self._ended.peak_bytes
