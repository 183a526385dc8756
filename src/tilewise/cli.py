"""The ``tilewise`` command: doctor, explain, study, demo, bench, tune.

Each subcommand is imported when it is called, so that a package that only one of them needs is no
trouble for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from tilewise.errors import TilewiseError

__all__ = ["main"]


class _Command(NamedTuple):
    name: str
    module: str
    help: str
    function: str = "main"


_COMMANDS = (
    _Command("doctor", "tilewise.doctor", "what runs here, and why the rest does not"),
    _Command("explain", "tilewise.lab.explain", "the plan for a problem given by its shape"),
    _Command("study", "tilewise.lab.study.command", "find out which training choices pay"),
    _Command("demo", "tilewise.lab.study.command", "the study of the kernels, for short", "demo"),
    _Command("bench", "tilewise.lab.bench", "measure against torch's own attention"),
    _Command("tune", "tilewise.lab.tune", "measure blocks for the GPU that is there"),
)


def _usage() -> str:
    lines = ["usage: tilewise COMMAND [options]", ""]
    lines += [f"  {command.name:<8} {command.help}" for command in _COMMANDS]
    return "\n".join([*lines, "", "tilewise COMMAND --help tells more."])


def _load(command: _Command) -> Callable[[Sequence[str]], int | None]:
    try:
        main: Callable[[Sequence[str]], int | None]
        main = getattr(import_module(command.module), command.function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tilewise"):
            raise
        sys.exit(
            f"tilewise {command.name}: the package {error.name!r} is missing; "
            "install it with: pip install 'tilewise[lab]'"
        )
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: the arguments after the program's name; None takes them from the command line.

    Returns:
        the exit status: 0 done, 1 the subcommand says no, 2 wrong usage, 130 interrupted.
    """
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    chosen = next((command for command in _COMMANDS if command.name == name), None)
    if chosen is None:
        print(f"tilewise: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return _load(chosen)(rest) or 0
    except TilewiseError as error:
        print(f"tilewise {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
