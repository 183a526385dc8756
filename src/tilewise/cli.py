"""The ``tilewise`` command: its subcommands, and the script that completes them in a shell.

Each subcommand is imported when it is called, so that a package that only one of them needs is no
trouble for the others.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple, TypeAlias

from tilewise import __version__
from tilewise.commands import plugin, visible
from tilewise.errors import TilewiseError
from tilewise.loading import INTERRUPTED, ending_at_once

_Main: TypeAlias = Callable[[Sequence[str]], int | None]


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
    _Command("completion", "a script for the shell's TAB key", __name__),
)
_SHELLS = ("bash", "zsh", "fish")
_BASH = """\
_tilewise() {{
  local words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _tilewise tilewise"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit -i; }
autoload -U +X bashcompinit && bashcompinit
"""


def _usage() -> str:
    lines = ["usage: tilewise COMMAND [options]", "       tilewise --version", ""]
    lines += [f"  {command.name:<10} {command.help}" for command in _COMMANDS]
    return "\n".join([*lines, "", "tilewise COMMAND --help tells more."])


def _load(command: _Command) -> _Main:
    if command.module == __name__:
        return _complete
    main: _Main
    main = import_module(command.module).main if command.module else plugin(command.name)
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


def _complete(argv: Sequence[str]) -> int:
    """Print the script of a shell; it needs no further program when it runs."""
    parser = argparse.ArgumentParser(
        prog="tilewise completion",
        description="Print a script that completes commands, options, suites and recipes. Put it "
        "where your shell looks: for bash ~/.local/share/bash-completion/completions/tilewise, for "
        "fish ~/.config/fish/completions/tilewise.fish. For zsh, source it in ~/.zshrc.",
    )
    parser.add_argument("shell", choices=_SHELLS)
    shell = parser.parse_args(argv).shell
    known = _words()
    print(_fish(known) if shell == "fish" else _bash(known, shell))
    return 0


def _words() -> dict[str, list[str]]:
    """Return, by command, the names and options that may follow it; of commands that are there."""
    names: dict[str, list[str]] = {}
    with suppress(TilewiseError):
        names = plugin("completion-names")()
    found = {"completion": list(_SHELLS)}
    for command in _COMMANDS:
        if command.name not in found:
            with suppress(TilewiseError):
                found[command.name] = [*names.get(command.name, ()), *_options(_load(command))]
    return found


def _options(command: _Main) -> list[str]:
    """Return the options that a command's help names."""
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        command(["--help"])
    named = re.findall(r"^ +(?:-\w, )?(--[a-z][\w-]*)", said.getvalue(), re.MULTILINE)
    return list(dict.fromkeys(named))


def _bash(known: dict[str, list[str]], shell: str) -> str:
    cases = "\n".join(f'      {name}) words="{" ".join(each)}" ;;' for name, each in known.items())
    script = _BASH.format(commands=" ".join(known), cases=cases)
    return script if shell == "bash" else _ZSH + script


def _fish(known: dict[str, list[str]]) -> str:
    lines, helps = [], {command.name: command.help for command in _COMMANDS}
    for name, each in known.items():
        first = f"complete -c tilewise -n __fish_use_subcommand -f -a {name}"
        lines.append(f'{first} -d "{helps[name]}"')
        after = f"complete -c tilewise -n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"{after} -l {word[2:]}" if word.startswith("--") else f"{after} -a {word}"
            for word in each
        ]
    return "\n".join(lines)
