"""The training contest: every arm in a process of its own, taking turns of a few steps.

Taking turns spreads whatever else the machine does over all arms alike, and only one arm computes
at a time, so that each has all the threads.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilewise.errors import TilewiseError
from tilewise.lab.demo.child import Child
from tilewise.lab.demo.settings import ARMS, CONTROLS, Settings
from tilewise.lab.demo.worker import Job
from tilewise.nn import Implementation

TURN = 4  # steps of one arm before the next one's turn
WARMUP = 3  # first steps, which allocate and plan: shown, but left out of the step time


class DivergenceError(TilewiseError, ArithmeticError):
    """A loss is no longer a number."""


class Watcher(Protocol):
    """Is told of every turn (for a progress bar)."""

    def turn(self, arm: str, step: int, loss: float, step_s: float) -> None:
        """``arm`` has done ``step`` steps, the last with ``loss`` in ``step_s`` seconds."""


@dataclass
class Arm:
    """What is known of one arm: grows while it trains, and is part of the raw JSON.

    Args:
        name: ``plain``, ``tilewise``, or a control.
        implementation: the attention that it uses.
        nudge_seed: of the one-ulp change of its initial weights; None for none.
        losses: nats per byte of each step's batch, before the step.
        wall_s, cpu_s: of each step; CPU over all threads.
        peak_bytes: most memory of its process over what it held before the model was built.
        saved_bytes: what autograd keeps of one step's forward pass for its backward pass.
        held_out: nats per byte on the held-out text at the end.
        sample: text that the trained model writes, one character a byte.
        warnings: what its process said on standard error.
    """

    name: str
    implementation: Implementation
    nudge_seed: int | None = None
    losses: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    held_out: float | None = None
    sample: str | None = None
    warnings: str = ""

    def job(self, settings: Settings, corpus: str) -> Job:
        """The job of this arm's process."""
        return Job(settings.as_json(), corpus, self.implementation, self.nudge_seed)


def line_up(settings: Settings) -> list[Arm]:
    """The arms in the order of their turns.

    The controls are plain arms whose initial weights are moved by one ulp: how far they drift from
    the plain arm is what rounding alone does to a training run.
    """
    plain, tilewise = ARMS
    controls = [
        Arm(name, "plain", nudge_seed=settings.seed + 100 + index)
        for index, name in enumerate(CONTROLS)
    ]
    return [Arm(plain, "plain"), Arm(tilewise, "tilewise"), *controls]


def run(settings: Settings, arms: list[Arm], corpus: str, watcher: Watcher) -> None:
    """Train all arms to the end; ``arms`` holds what is known at any moment.

    Raises:
        DivergenceError: a loss became NaN or infinite.
        ChildError: the process of an arm ended early.
    """
    with ExitStack() as stack:
        children = [stack.enter_context(Child(arm.job(settings, corpus), arm.name)) for arm in arms]
        for child in children:
            child.hear()  # all have started before anyone's turn is timed
        while len(arms[-1].losses) < settings.steps:
            _round(settings, arms, children, watcher)
        for arm, child in zip(arms, children, strict=True):
            reply = child.ask(do="held_out")
            arm.held_out, arm.saved_bytes = reply["held_out"], reply["saved_bytes"]
            if arm.name in ARMS:
                arm.sample = child.ask(do="sample")["sample"]


def _round(settings: Settings, arms: list[Arm], children: list[Child], watcher: Watcher) -> None:
    for arm, child in zip(arms, children, strict=True):
        done = len(arm.losses)
        # The first turn is one step, so that the progress bar soon knows how long it all takes.
        count = min(TURN if done else 1, settings.steps - done)
        _record(arm, child.ask(do="steps", count=count))
        arm.warnings = child.warnings()
        watcher.turn(arm.name, len(arm.losses), arm.losses[-1], arm.wall_s[-1])
        bad = [index for index, loss in enumerate(arm.losses) if not math.isfinite(loss)]
        if bad:
            raise DivergenceError(
                f"{arm.name}: the loss is {arm.losses[bad[0]]} at step {bad[0] + 1}; the training "
                "diverged. Try another --seed, or a smaller model."
            )


def _record(arm: Arm, reply: dict[str, Any]) -> None:
    arm.losses += reply["losses"]
    arm.wall_s += reply["wall_s"]
    arm.cpu_s += reply["cpu_s"]
    arm.peak_bytes = reply["peak_bytes"]
