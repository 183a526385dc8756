"""Somebody's own training as a task: nothing of it is known but the metric that it reports.

``conduct/script.py`` runs it. A command is split into words as a shell would, without a shell, and
each ``{name}`` in it is replaced: by a choice, ``{seed}``, ``{folder}`` or ``{steps}``. The word
``{choices}`` stands for all choices, as ``--name=value``. ``python`` is the Python that runs the
study.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar, NamedTuple

from tilelab.study.ask.metrics import Floor, undirected
from tilelab.study.ask.run_config import OF_SCRIPT, RunConfig
from tilelab.study.tasks.task import DataBytes
from tilewise.errors import InvalidArgument

GIVEN = ("seed", "folder", "steps")  # what the runner gives, beside the choices
_ALL = "{choices}"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class Source(NamedTuple):
    """The script, in place of the data of a task; see ``task.Prepared``."""

    name: str
    sha256: str  # of its files, as the study was asked; empty where nobody said

    def as_json(self) -> dict[str, Any]:
        """Return both for the records."""
        return self._asdict()

    def __str__(self) -> str:
        return f"Script: {self.name}"


@dataclass(frozen=True)
class Script:
    """A command or a function, and what it reports; the options are those of the task."""

    external: ClassVar[bool] = True  # these four as of ``task.AbstractTask``
    learns_text: ClassVar[bool] = False
    fine_tunes: ClassVar[bool] = False
    unit: ClassVar[str] = "example"

    command: str
    function: str  # ``file.py:function``
    metric: str  # by which it is decided, with its direction: ``lower:val_loss``
    lines: str  # a file in the run's folder that has the lines; empty for standard output
    files: tuple[str, ...]  # that decide what a run does, with the command's or the function's own
    sha256: str  # of them

    @property
    def metrics(self) -> tuple[str, ...]:
        """The one metric that it has."""
        return (self.metric,)

    @property
    def key(self) -> str:
        """The metric's name in the lines."""
        return undirected(self.metric)

    def check(self, config: RunConfig) -> None:
        """Refuse settings that a script would never hear of.

        Raises:
            InvalidArgument: it is neither a command nor a function, or both; a part of the config
                that is not the script's is set; a choice has the name of something else, or is
                nowhere in the command; a word of the command is neither a choice nor given.
        """
        if bool(self.command) == bool(self.function):
            came = "both a command and a function" if self.command else "neither of the two"
            raise InvalidArgument("task", came, "either task.command or task.function")
        for name in RunConfig.model_fields.keys() - {*OF_SCRIPT}:
            if getattr(config, name) != RunConfig.model_fields[name].get_default():
                fix = "A script has choices of its own: choice.NAME."
                raise InvalidArgument(name, "a change", "its default: the task is a script", fix)
        if config.budget.steps is None:
            came = "tokens or epochs"
            raise InvalidArgument("budget", came, "budget.steps, which a script gets as steps")
        for name in config.choice:
            if name in (*GIVEN, "choices", "log") or not _NAME.fullmatch(name):
                required = f"a name of letters, digits, _ and -, and none of {', '.join(GIVEN)}"
                raise InvalidArgument("choice", repr(name), required)
        if self.command:
            _check_command(self.command, config.choice)

    def check_files(self) -> None:
        """Refuse a run of other files than those that the study began with.

        Raises:
            InvalidArgument: one was changed since.
        """
        found = [Path(each) for each in self.files]
        if not found or not all(each.is_file() for each in found) or digest(found) == self.sha256:
            return  # what is not there fails by itself, and may be elsewhere on another machine
        names = ", ".join(self.files)
        fix = "The same command begins a study of the new ones; undo the change to go on with this."
        raise InvalidArgument(
            "task.files", f"{names}, changed since", "what the study began with", fix
        )

    def prepare(self, config: RunConfig, cache: Path) -> Source:
        """Return its name and its hash."""
        return Source(self.command or self.function, self.sha256)

    def floors(self, config: RunConfig, data: Source, seed: int, cache: Path) -> tuple[Floor, ...]:
        """Nothing simpler is known."""
        return ()

    def data_bytes(self, config: RunConfig) -> DataBytes:
        """Nothing is known of it."""
        return DataBytes()


def digest(files: Sequence[Path]) -> str:
    """Return the hash of files, one after the other; empty for none."""
    found = hashlib.sha256()
    for each in files:
        found.update(each.read_bytes())
    return found.hexdigest() if files else ""


def arguments(config: RunConfig, command: str, seed: int, folder: Path) -> list[str]:
    """Return the words of a command for one run."""
    values = {**config.choice, "seed": seed, "folder": folder, "steps": config.steps}
    words: list[str] = []
    for word in shlex.split(command):
        if word == _ALL:
            words += [f"--{name}={value}" for name, value in config.choice.items()]
        else:
            words.append(word.format_map({name: str(each) for name, each in values.items()}))
    return [sys.executable if words[0] in ("python", "python3") else words[0], *words[1:]]


def _check_command(command: str, choices: Mapping[str, Any]) -> None:
    try:
        words = shlex.split(command)
        parts = [part for word in words if word != _ALL for part in Formatter().parse(word)]
        named = {name for _, name, _, _ in parts if name is not None}
    except ValueError as error:
        raise InvalidArgument("task.command", repr(command), f"a command ({error})") from None
    known = {*choices, *GIVEN}
    for name in sorted(named - known):
        required = f"one of {', '.join(sorted(known))} between braces, or {_ALL} for all choices"
        raise InvalidArgument("task.command", f"{{{name}}}", required, "Braces are written {{ }}.")
    for name in choices:
        if name not in named and _ALL not in words:
            required = f"a choice that the command has: {{{name}}} in it, or {_ALL} for all"
            raise InvalidArgument("choice", repr(name), required)
    if "seed" not in named:
        required = "{seed} in it: seeds that the script does not get pair nothing"
        raise InvalidArgument("task.command", repr(command), required)
