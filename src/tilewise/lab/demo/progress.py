"""What the demo says while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import statistics
from typing import TextIO

from tilewise.lab.demo.contest import Arm

_BAR = 24
_LINES = 10  # progress lines of a whole run where there is no terminal


class Progress:
    """Follows the training of all arms.

    Args:
        arms: the arms that train (read, never changed).
        steps: of each.
        stream: where to write.
    """

    def __init__(self, arms: list[Arm], steps: int, stream: TextIO) -> None:
        self.arms, self.steps, self.stream = arms, steps, stream
        self.on_terminal = stream.isatty()
        self._lines = 0

    def say(self, text: str = "") -> None:
        """Write a whole line."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def turn(self, arm: str, step: int, loss: float, step_s: float) -> None:
        """One arm has had its turn (see ``contest.Watcher``)."""
        done = sum(len(each.losses) for each in self.arms)
        share = done / (self.steps * len(self.arms))
        if self.on_terminal:
            filled = round(share * _BAR)
            bar = "#" * filled + "-" * (_BAR - filled)
            status = f"{arm} {step}/{self.steps} loss {loss:.3f} ({step_s * 1e3:.0f} ms)"
            # A line that wraps could not be written over.
            width = shutil.get_terminal_size().columns - 1
            line = f"[{bar}] {share:4.0%} {self.left()} {status}"[:width]
            self.stream.write(f"\r{line}\x1b[K")
            self.stream.flush()
        elif arm == self.arms[-1].name and share * _LINES >= self._lines:
            self._lines = int(share * _LINES) + 1
            losses = "  ".join(f"{each.name} {each.losses[-1]:.6f}" for each in self.arms)
            self.say(f"step {step:>4}/{self.steps}  {self.left()}  {losses}")

    def left(self) -> str:
        """How long the training still takes, from the steps so far."""
        seconds = 0.0
        for arm in self.arms:
            if not arm.wall_s:
                return "        "
            seconds += (self.steps - len(arm.wall_s)) * statistics.median(arm.wall_s[-8:])
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}:{rest:02d} left"

    def end(self) -> None:
        """Leave the bar's line."""
        if self.on_terminal:
            self.say()
