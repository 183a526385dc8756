"""``tilewise explain``: how a problem given by its shape would be done, and what it moves."""

from tilewise.lab.explain.command import main

__all__ = ["main"]
