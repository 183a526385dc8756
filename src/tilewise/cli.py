"""The ``tilewise`` command: its subcommands.

Each subcommand is imported when it is called, so that a package that only one of them needs is no
trouble for the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import NamedTuple

from tilewise import __version__
from tilewise.commands import plugin
from tilewise.commands.visible import visible
from tilewise.errors import TilewiseError
from tilewise.loading import INTERRUPTED, ending_at_once


class _Command(NamedTuple):
    name: str
    help: str
    module: str = ""  # "": a package adds the command


_COMMANDS = (
    _Command("doctor", "what runs here, and why the rest does not", "tilewise.doctor"),
    _Command("explain", "the plan for a problem given by its shape", "tilewise.commands.explain"),
    _Command("study", "find out which training choices pay"),
    _Command("demo", "the study of the kernels, for short"),
    _Command("bench", "measure against torch's own attention"),
    _Command("tune", "measure blocks for the GPU that is there"),
    _Command("completion", "a script for the shell's TAB key", "tilewise.commands.completion"),
)


def _usage() -> str:
    lines = ["usage: tilewise COMMAND [options]", "       tilewise --version", ""]
    lines += [f"  {command.name:<10} {command.help}" for command in _COMMANDS]
    return "\n".join([*lines, "", "tilewise COMMAND --help tells more."])


def _load(command: _Command) -> Callable[[Sequence[str]], int | None]:
    main: Callable[[Sequence[str]], int | None]
    main = import_module(command.module).main if command.module else plugin(command.name)
    if command.name == "completion":  # it asks the others for their options
        others = [each for each in _COMMANDS if each is not command]
        return partial(
            main, commands={each.name: (each.help, partial(_load, each)) for each in others}
        )
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: the arguments after the program's name; None takes them from the command line.

    Returns:
        the exit status: 0 done, 1 the subcommand says no or nobody reads what it prints, 2 wrong
            usage, 130 interrupted.
    """
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"tilewise {__version__}")
        return 0
    chosen = next((command for command in _COMMANDS if command.name == name), None)
    if chosen is None:
        near = get_close_matches(name, [command.name for command in _COMMANDS], n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        print(f"tilewise: unknown command {name!r}.{meant}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        with ending_at_once():
            run = _load(chosen)
        status = run(rest) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has gone, as `head` does after its lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TilewiseError as error:
        print(visible(f"tilewise {name}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
