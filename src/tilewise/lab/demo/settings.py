"""What one demo run is: its numbers, and how the command line names them."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.errors import InvalidArgument

ARMS = ("plain", "tilewise")
CONTROLS = ("control-1", "control-2")


@dataclass(frozen=True)
class Settings:
    """The numbers of one run; everything that the children need to repeat it.

    Args:
        steps: optimizer steps of each arm.
        context: bytes in one training window.
        batch: windows per step.
        layers, heads, width: shape of the model.
        seed: of the weights, the order of the data and the sampling.
        threads: torch threads of the arm that is running (one runs at a time).
        learning_rate: the peak of the schedule.
        sample_bytes: how much text the trained model writes.
        long_contexts: window lengths of the long-context table, ascending.
        text: a file to train on; None for the Python standard library.
        out: folder of the report.
    """

    steps: int = 160
    context: int = 1024
    batch: int = 2
    layers: int = 4
    heads: int = 4
    width: int = 128
    seed: int = 0
    threads: int = 1
    learning_rate: float = 2e-3
    sample_bytes: int = 400
    long_contexts: tuple[int, ...] = (2048, 4096, 8192, 16384)
    text: Path | None = None
    out: Path = Path("demo-report")

    def as_json(self) -> dict[str, Any]:
        """The settings in JSON's types; ``from_json`` reads them back."""
        text = None if self.text is None else str(self.text)
        return {**asdict(self), "text": text, "out": str(self.out)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """The inverse of ``as_json``."""
        text = None if values["text"] is None else Path(values["text"])
        long_contexts = tuple(values["long_contexts"])
        return cls(
            **{**values, "text": text, "out": Path(values["out"]), "long_contexts": long_contexts}
        )


QUICK = Settings(
    steps=24,
    context=128,
    batch=1,
    layers=2,
    heads=2,
    width=32,
    sample_bytes=40,
    long_contexts=(512,),
)
_AT_LEAST = {"steps": 1, "context": 16, "batch": 1, "layers": 1, "heads": 1, "threads": 1}


def parse(argv: list[str]) -> Settings:
    """The settings that a command line asks for.

    Raises:
        SystemExit: argparse's own, with code 2 for a wrong option and 0 for ``--help``.
        InvalidArgument: numbers that do not fit together.
    """
    arguments = _parser().parse_args(argv)
    settings = QUICK if arguments.quick else Settings()
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name != "quick" and value is not None
    }
    settings = replace(settings, **{"threads": usable_cores(), **given})
    settings = replace(settings, long_contexts=tuple(sorted(settings.long_contexts)))
    if any(context < _AT_LEAST["context"] for context in settings.long_contexts):
        came = " ".join(map(str, settings.long_contexts))
        raise InvalidArgument("--long", came, f"windows of {_AT_LEAST['context']} or more")
    for name, least in _AT_LEAST.items():
        value = getattr(settings, name)
        if value < least:
            raise InvalidArgument(f"--{name}", str(value), f"{least} or more")
    if settings.width % (2 * settings.heads):
        required = f"a multiple of 2 * heads = {2 * settings.heads} (rotary turns pairs)"
        raise InvalidArgument("--width", str(settings.width), required)
    return settings


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="tilewise demo",
        description="Train a small byte-level GPT with plain attention and with tilewise, from the "
        "same seed on the same data, and report whether they agree and what it saved.",
    )
    parser.add_argument(
        "--text", type=Path, help="file to train on (default: *.py of the Python standard library)"
    )
    for name, what in (
        ("steps", "optimizer steps of each arm"),
        ("context", "bytes in one window"),
        ("batch", "windows per step"),
        ("layers", "layers"),
        ("heads", "attention heads"),
        ("width", "channels"),
        ("seed", "seed of weights, data order and sampling"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({getattr(default, name)})")
    parser.add_argument("--threads", type=int, help="torch threads (the cores there are)")
    parser.add_argument(
        "--long",
        dest="long_contexts",
        type=int,
        nargs="*",
        metavar="N",
        help="windows of the long-context table; nothing for none "
        f"({' '.join(map(str, default.long_contexts))})",
    )
    parser.add_argument("--out", type=Path, help=f"folder of the report ({default.out})")
    parser.add_argument("--quick", action="store_true", help="a tiny run of seconds, for tests")
    return parser
