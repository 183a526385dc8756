"""Describe where something is measured, for records: no host name, no path.

``write_runs`` writes the runs of a script beside it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import tilewise
from tilelab.common import memory
from tilewise.chips import detect
from tilewise.inspect.peaks import absence, isa

_OURS, _OF_ONE_RUN = "TILEWISE_", "TILEWISE_STUDY_JOB"
_PATHS = ("TILEWISE_CACHE", "TILEWISE_DATA", "TILEWISE_TUNED")
_PACKAGES = ("tilewise", "torch", "numpy", "schedulefree", "tokenizers", "scipy")


def describe(threads: int) -> dict[str, Any]:
    """Versions, chip, memory, instruction set, git commit and load."""
    chip = detect()
    return {
        "chip": chip.name,
        "cores": chip.cores,
        "memory_bytes": memory.total_bytes(),
        "threads": threads,
        "instruction_set": absence() or isa(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := version(name))},
        "commit": commit(),
        "load_average": load_average(),
    }


def load_average() -> float | None:
    """Return how many processes want a core, the mean of the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def variables() -> dict[str, str]:
    """Return tilewise's variables in this environment, for runs on machines that lack them.

    Paths are absolute: elsewhere another folder is the working one.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_OURS) and name != _OF_ONE_RUN and value
    }
    for name in found.keys() & set(_PATHS):
        if found[name].lower() != "off":  # a word of TILEWISE_TUNED
            found[name] = str(Path(found[name]).expanduser().absolute())
    return found


def commit() -> str:
    """Return the git commit of this tilewise, ``+`` for changes on top; empty if there is none."""
    folder = Path(tilewise.__file__).parent
    revision = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not revision:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", str(folder))
    return revision + ("+" if changed else "")


def pinnable_cores(devices: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """Return one processor of each usable core; none where threads cannot be pinned.

    Two runs on the two hardware threads of one core would measure each other.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    found: dict[str, int] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (devices / f"cpu{processor}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(processor)
        found.setdefault(siblings.strip(), processor)
    return tuple(found.values())


def version(package: str) -> str:
    """Return the version of an installed package; empty where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command: Sequence[str] = ("git", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_runs(
    runs: Iterable[Mapping[str, Any]], line: Callable[[Any], str], path: Path | None
) -> None:
    """Print a line for each run as it is found, and write all of them with the machine.

    Runs are what a script measures on one thread, in JSON's types.
    """
    record: dict[str, Any] = {"machine": describe(1), "runs": []}
    for run in runs:
        print(line(run), flush=True)
        record["runs"].append(run)
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
