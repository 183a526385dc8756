"""The bench: ours and torch's attention measured side by side, against the machine's own peak."""

from tilewise.lab.bench.entry import main

__all__ = ["main"]
