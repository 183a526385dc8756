"""The bench: ours and torch's attention measured side by side, against the machine's own peak."""

from tilewise.lab.bench.command import main

__all__ = ["main"]
