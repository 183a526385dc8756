"""The names that the shell's TAB key offers after ``tilewise bench`` and ``tilewise study``."""

from __future__ import annotations


def names() -> dict[str, list[str]]:
    """Return, by command, the names that may follow it: suites, recipes and subcommands."""
    from tilelab.bench.command import NAMES
    from tilelab.study import recipes
    from tilelab.study.command import SUBCOMMANDS

    return {"bench": list(NAMES), "study": [*recipes.names(), *SUBCOMMANDS]}
