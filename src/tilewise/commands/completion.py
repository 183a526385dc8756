"""``tilewise completion``: a script that completes the command in bash, zsh or fish."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress

from tilewise.commands import plugin
from tilewise.errors import TilewiseError

# By name: what a command does, and how to get its function of the arguments.
Commands = Mapping[str, tuple[str, Callable[[], Callable[[Sequence[str]], int | None]]]]
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


def main(argv: Sequence[str], commands: Commands) -> int:
    """Print the script; it needs no further program when it runs."""
    parser = argparse.ArgumentParser(
        prog="tilewise completion",
        description="Print a script that completes commands, options, suites and recipes. Put it "
        "where your shell looks: for bash ~/.local/share/bash-completion/completions/tilewise, for "
        "fish ~/.config/fish/completions/tilewise.fish. For zsh, source it in ~/.zshrc.",
    )
    parser.add_argument("shell", choices=_SHELLS)
    shell = parser.parse_args(argv).shell
    known = words(commands)
    print(_fish(known, commands) if shell == "fish" else _bash(known, shell))
    return 0


def words(commands: Commands) -> dict[str, list[str]]:
    """Return, by command, the names and options that may follow it; of commands that are there."""
    names: dict[str, list[str]] = {"completion": list(_SHELLS)}
    with suppress(TilewiseError):
        names |= plugin("completion-names")()
    found = {"completion": names["completion"]}
    for command, (_, load) in commands.items():
        with suppress(TilewiseError):
            found[command] = [*names.get(command, ()), *_options(load())]
    return found


def _options(command: Callable[[Sequence[str]], int | None]) -> list[str]:
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


def _fish(known: dict[str, list[str]], commands: Commands) -> str:
    lines = []
    for name, each in known.items():
        first = f"complete -c tilewise -n __fish_use_subcommand -f -a {name}"
        lines.append(f'{first} -d "{commands[name][0]}"' if name in commands else first)
        after = f"complete -c tilewise -n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"{after} -l {word[2:]}" if word.startswith("--") else f"{after} -a {word}"
            for word in each
        ]
    return "\n".join(lines)
