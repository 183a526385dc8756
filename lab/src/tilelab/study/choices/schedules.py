"""Schedules: the learning rate of a step as a share of the optimizer's ``lr``.

``t`` is the step about to be taken, 0 for the first; ``T`` the steps of the run; ``W`` the steps of
warm-up: ``warmup_steps`` where that is above 0, else ``warmup * T``, rounded; at most T - 1. With
``warmup_steps`` longer runs all warm up alike, whatever ``warmup`` says. During warm-up (t < W)
every schedule but one-cycle is (t + 1) / (W + 1). So no step is wasted on a rate of zero, and step
W is the first at the full rate. After warm-up, with x = (t - W) / (T - W) in [0, 1), each has its
own form, and none reaches its end before the run is over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from tilelab.study.ask.values import ADDED, CountOrZero, Share, find, register
from tilewise.errors import InvalidArgument

if TYPE_CHECKING:  # config imports this module, through values
    from tilelab.study.ask.config import Schedule


WarmupSteps = Annotated[CountOrZero, ADDED]


class Progress(NamedTuple):
    """The position within a run."""

    step: int  # t, the one about to be taken, 0 for the first
    steps: int  # T, of the whole run


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the share of the optimizer's ``lr`` at a step (0 for the first), in [0, 1]."""
    if not 0 <= step < steps:
        raise InvalidArgument("step", str(step), f"a step of the run, from 0 to {steps - 1}")
    entry = find("schedule", schedule.name)
    return float(entry.function(Progress(step, steps), **schedule.options))


@register("schedule")
def constant(progress: Progress, *, warmup: Share = 0.05, warmup_steps: WarmupSteps = 0) -> float:
    """The full rate after warm-up."""
    rise, _ = _phases(progress, warmup, warmup_steps)
    return rise


@register("schedule")
def linear(progress: Progress, *, warmup: Share = 0.05, warmup_steps: WarmupSteps = 0) -> float:
    """A straight line down to zero: 1 - x.

    Source: Bergsma et al., Straight to Zero (2025), which finds it better than cosine to a tenth.
    """
    rise, x = _phases(progress, warmup, warmup_steps)
    return rise * (1.0 - x)


@register("schedule")
def cosine(
    progress: Progress,
    *,
    warmup: Share = 0.05,
    floor: Share = 0.1,
    warmup_steps: WarmupSteps = 0,
) -> float:
    """Half a cosine down to the floor f: f + (1 - f) (1 + cos(pi x)) / 2.

    Source: Loshchilov and Hutter, SGDR (2017), equation 5, one cycle.
    """
    rise, x = _phases(progress, warmup, warmup_steps)
    return rise * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * x)))


def _phases_fit(*, warmup: float, decay: float, warmup_steps: int, **_: object) -> None:
    if not warmup_steps and warmup + decay > 1.0:
        came = f"{decay:g} with warmup {warmup:g}"
        raise InvalidArgument("schedule.decay", came, "warmup + decay of 1 at most")


@register("schedule", check=_phases_fit)
def wsd(
    progress: Progress,
    *,
    warmup: Share = 0.05,
    decay: Share = 0.2,
    shape: Literal["sqrt", "linear"] = "sqrt",
    warmup_steps: WarmupSteps = 0,
) -> float:
    """Warmup-stable-decay: 1, and over the last ``decay`` of the run 1 - sqrt(y) or 1 - y.

    y runs from 0 at the first step of the decay, t = T - D, to 1 - 1 / D at the last. D is
    ``decay * T``, rounded, and at most T - W: no decay begins before the warm-up ends.

    Sources: Hu et al., MiniCPM (2024), section 4; the square root: Haegele et al. (2024).
    """
    rise, _ = _phases(progress, warmup, warmup_steps)
    ramp = _warmup(progress, warmup, warmup_steps)
    last = min(round(decay * progress.steps), progress.steps - ramp)
    y = max(0.0, (progress.step - (progress.steps - last)) / last) if last else 0.0
    return rise * (1.0 - (math.sqrt(y) if shape == "sqrt" else y))


@register("schedule")
def inverse_sqrt(progress: Progress, *, warmup: Share = 0.05) -> float:
    """Inverse square root, which never ends: sqrt((W + 1) / (t + 1)).

    Source: Vaswani et al., Attention Is All You Need (2017), equation 3.
    """
    rise, _ = _phases(progress, warmup)
    ramp = _warmup(progress, warmup) + 1
    return min(rise, math.sqrt(ramp / (progress.step + 1)))


@register("schedule")
def one_cycle(
    progress: Progress, *, warmup: Share = 0.3, start: Share = 0.04, end: Share = 0.0
) -> float:
    """Half a cosine up from ``start`` to 1, and half a cosine down to ``end``.

    The optimizer's momentum is not cycled.

    Source: Smith and Topin, Super-Convergence (2018), section 4, with cosine flanks.
    """
    step, steps = progress
    rising = _warmup(progress, warmup)
    if step < rising:
        return 1.0 - (1.0 - start) * 0.5 * (1.0 + math.cos(math.pi * step / rising))
    x = (step - rising) / (steps - rising)
    return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * x))


def _warmup(progress: Progress, warmup: float, warmup_steps: int = 0) -> int:
    return min(warmup_steps or round(warmup * progress.steps), progress.steps - 1)


def _phases(progress: Progress, warmup: float, warmup_steps: int = 0) -> tuple[float, float]:
    """Return the warm-up factor (1 after it), and x, the elapsed share of the rest (0 before)."""
    ramp = _warmup(progress, warmup, warmup_steps)
    rise = min(1.0, (progress.step + 1) / (ramp + 1))
    return rise, max(0.0, (progress.step - ramp) / (progress.steps - ramp))
