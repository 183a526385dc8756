"""One run of the bench: where it ran, everything it found, and its JSON."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilelab.bench.result import CaseResult, Memory, Overhead, Scaling
from tilelab.common.compact import compact_json, read_json
from tilewise.chips import detect
from tilewise.inspect import peaks

__all__ = ["COMPLETE", "FORMAT", "Record"]

FORMAT = 2
COMPLETE = "complete"


@dataclass
class Record:
    """The results of a run, while it goes on and afterwards.

    Args:
        machine: where it ran: chip, instruction set, versions, load. No host names, no paths.
        threads: of the cases.
        status: ``"complete"``, or why not everything is there.
        seconds: how long the run took.
        cases, overhead, scaling, memory: the findings.
    """

    machine: dict[str, Any]
    threads: int
    status: str = "not finished"
    seconds: float = 0.0
    cases: list[CaseResult] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    @classmethod
    def begin(cls, threads: int) -> Record:
        """Return a record of a run that has not begun, on this machine."""
        return cls(_machine(), threads)

    @property
    def slug(self) -> str:
        """The chip as a folder's name."""
        return str(self.machine["slug"])

    def end(self, status: str, seconds: float) -> None:
        """The run is over."""
        self.status, self.seconds = status, round(seconds, 1)
        self.machine["load_average"].append(_load())

    def as_json(self) -> dict[str, Any]:
        """Everything, in JSON's types; ``from_json`` reads it back."""
        return {
            "format": FORMAT,
            "status": self.status,
            "seconds": self.seconds,
            "threads": self.threads,
            "machine": self.machine,
            "cases": [result.as_json() for result in self.cases],
            "overhead": [
                {**asdict(each), "times": each.times, "met": each.met} for each in self.overhead
            ],
            "scaling": [
                {
                    **asdict(each),
                    "ours": each.ours,
                    "bare_loop": each.bare_loop,
                    "same_length": each.same_length,
                    "relative": each.relative,
                    "met": each.met,
                }
                for each in self.scaling
            ],
            "memory": [asdict(each) for each in self.memory],
        }

    def write(self, path: Path) -> None:
        """Write the JSON, making its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(compact_json(self.as_json()))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record in a file.

        Raises:
            InvalidArgument: there is none that this version can read.
        """
        values = read_json(path, FORMAT, "a JSON file of the bench")
        return cls(
            values["machine"],
            values["threads"],
            values["status"],
            values["seconds"],
            [CaseResult.from_json(each) for each in values["cases"]],
            [Overhead(**_known(each, "times", "met")) for each in values["overhead"]],
            [
                Scaling(**_known(each, "ours", "bare_loop", "same_length", "relative", "met"))
                for each in values["scaling"]
            ],
            [Memory(**each) for each in values["memory"]],
        )


def _known(values: dict[str, Any], *derived: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in derived}


def _machine() -> dict[str, Any]:
    chip, told = detect(), _cpuinfo()
    numbers = "-".join(told[key] for key in ("cpu family", "model") if key in told)
    return {
        "chip": chip.name,
        # Virtual machines hide which processor they are; the family and the model do not.
        "slug": re.sub(r"[^a-z0-9]+", "-", f"{chip.name} {numbers}".lower()).strip("-"),
        "family": told.get("cpu family", ""),
        "model": told.get("model", ""),
        "cores": chip.cores,
        "cache_bytes": {"l1": chip.l1_bytes, "l2": chip.l2_bytes, "l3": chip.l3_bytes},
        "isa": peaks.isa(),
        "flags": [
            flag
            for flag in told.get("flags", told.get("Features", "")).split()
            if flag.startswith(("avx", "fma", "f16c", "amx", "asimd", "sve", "bf16"))
        ],
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tilewise": _version("tilewise"),
        },
        "load_average": [_load()],
    }


def _cpuinfo() -> dict[str, str]:
    """Return the description of the first processor; empty where the system has none."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _load() -> float | None:
    """Processes that want a core, the mean of the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from its source tree"
