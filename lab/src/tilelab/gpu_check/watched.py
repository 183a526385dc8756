"""A process that a tool of NVIDIA's watches: ncu, which counts, or compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tilewise.errors import TilewiseError

_REST_S = 5.0


class CannotWatch(TilewiseError):  # noqa: N818  no error of the check: a tool is not there
    """Why nothing can be counted or checked here."""


def watch(
    tool: str,
    arguments: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run a command under a tool to its end, whatever its status.

    Raises:
        CannotWatch: the tool is missing, or not done in time.
    """
    name = tool.partition(" ")[0]
    program = shutil.which(name)
    if program is None:
        raise CannotWatch(f"{tool} is not installed")
    whole = [program, *arguments, *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(whole, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            out, err = _rest(process)
            done = subprocess.CompletedProcess(whole, process.returncode, out, err)
            said = f"{name} was not done after {limit_s:.0f} s: {last_words(done)}"
            raise CannotWatch(said.removesuffix(": ")) from None
        except BaseException:
            _end(process.pid)
            raise
    return subprocess.CompletedProcess(whole, process.returncode, out, err)


def _rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a process printed that was ended; nothing where somebody else holds its pipes."""
    with suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=_REST_S)
    return "", ""


def _end(process: int) -> None:
    """End a process and all that it has started: what it watches would keep the GPU busy.

    They stay in this process's group, so that whoever ends that ends them too.
    """
    family = [process]
    for parent in family:
        family += [child for child, of in _parents() if of == parent]
    for each in family:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _parents() -> Iterator[tuple[int, int]]:
    """Yield every process, and the one that started it."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            # "7 (its name) S 1 ..", and a name may hold anything.
            yield int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of what a process printed, in one line."""
    return " ".join((done.stdout + done.stderr).split())[-200:]
