"""The bench: ours and torch's attention measured side by side, against the machine's own peak."""

from tilelab.bench.entry import main

__all__ = ["main"]
