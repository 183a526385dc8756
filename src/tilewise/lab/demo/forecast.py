"""How long a run will take, before it starts: a matrix product is timed, the rest is arithmetic."""

from __future__ import annotations

import statistics
import time

import torch

from tilewise.lab.demo.settings import CONTROLS, Settings

# Fractions of the machine's matrix-product rate that each part of a step reaches, and the start of
# a child process; measured on two cores of a Zen 4 machine. Good to a factor of two elsewhere.
_DENSE_RATE = 0.8
_FUSED_RATE = 0.6
_PLAIN_RATE = 0.35
_START_S = 3.0


def forecast_s(settings: Settings) -> float:
    """Seconds that the whole demo will take, roughly."""
    rate = _matrix_rate()
    tokens = settings.batch * settings.context
    fused = _step_s(settings, tokens, settings.context, rate, _FUSED_RATE, 0.5)
    plain = _step_s(settings, tokens, settings.context, rate, _PLAIN_RATE, 1.0)
    arms = 2 + len(CONTROLS)
    total = settings.steps * (fused + plain * (arms - 1)) + arms * _START_S
    for context in settings.long_contexts:
        total += 2 * _step_s(settings, context, context, rate, _FUSED_RATE, 0.5)
        total += _step_s(settings, context, context, rate, _PLAIN_RATE, 1.0) + 3 * _START_S
    return total


def _step_s(
    settings: Settings, tokens: int, context: int, rate: float, attention_rate: float, share: float
) -> float:
    """One forward and backward; ``share`` of the score matrix is computed."""
    width, layers = settings.width, settings.layers
    dense = 6 * tokens * (12 * layers * width * width + 256 * width)
    attention = 12 * tokens * layers * width * context * share
    return dense / (rate * _DENSE_RATE) + attention / (rate * attention_rate)


def _matrix_rate() -> float:
    """Floating-point operations per second of a matrix product, median of a few."""
    size = 768
    a, b = torch.randn(2, size, size)
    torch.mm(a, b)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)


def in_words(seconds: float) -> str:
    """A rough time in words."""
    if seconds < 90:
        return f"about {max(round(seconds / 10), 1) * 10} seconds"
    return f"about {seconds / 60:.0f} minutes"
