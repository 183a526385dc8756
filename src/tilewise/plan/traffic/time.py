"""Turn an account of bytes into seconds on a chip.

The model assumes that memory, matrix products and exponentials all run at once inside a pass, each
at its ceiling. So a pass takes as long as the longest of them. Passes follow one another and do not
overlap. The model leaves out launch costs and how far kernels stay below the ceilings. So it is a
lower bound; good kernels come within some tens of percent of it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tilewise.chips import Chip
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic.count import Traffic

Bound = Literal["memory", "matrix", "exponential"]


class Seconds(NamedTuple):
    """How long an account takes on a chip.

    Args:
        memory, matrix, exponential: what each ceiling alone asks for, over all passes.
        total: pass after pass the longest of the three.
        bound: which of them the most of ``total`` is.
    """

    memory: float
    matrix: float
    exponential: float
    total: float
    bound: Bound


def predict(traffic: Traffic, chip: Chip, dtype: str) -> Seconds:
    """Return the time of an account.

    Args:
        traffic: bytes as they reach memory (``Traffic.behind`` takes the caches out).
        chip: with bandwidth and peaks.
        dtype: of the products of passes that name none of their own, e.g. "bfloat16".

    Raises:
        InvalidArgument: the chip's row lacks a figure.
    """
    sums, held = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for one in traffic.passes:
        ceilings = _ceilings(chip, one.dtype or dtype)
        amounts = (one.bytes, one.flops, one.exponentials)
        times = [amount / rate for amount, rate in zip(amounts, ceilings, strict=True)]
        longest = max(range(3), key=lambda index: times[index])
        held[longest] += times[longest]
        sums = [total + share for total, share in zip(sums, times, strict=True)]
    names: tuple[Bound, ...] = ("memory", "matrix", "exponential")
    bound = names[max(range(3), key=lambda index: held[index])]
    memory, matrix, exponential = sums
    return Seconds(memory, matrix, exponential, sum(held), bound)


def balance(chip: Chip, dtype: str) -> float:
    """Operations for a byte at which memory and matrix products take as long: the ridge."""
    bandwidth, flops, _ = _ceilings(chip, dtype)
    return flops / bandwidth


def _ceilings(chip: Chip, dtype: str) -> tuple[float, float, float]:
    found = (
        ("memory bandwidth", chip.bandwidth_bytes_s),
        (f"peak in {dtype}", chip.peak(dtype)),
        ("rate of exponentials", chip.exponentials_s),
    )
    rates = []
    for what, rate in found:
        if not rate:
            fix = "Measure it: `tilewise doctor --peak`." if chip.kind == "cpu" else ""
            raise InvalidArgument("chip", f"{chip.name}, without a {what}", f"a known {what}", fix)
        rates.append(rate)
    return rates[0], rates[1], rates[2]
