"""Numbers as people read them, the same in the report and on the terminal."""

from __future__ import annotations

import re

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def seconds(value: float) -> str:
    """A duration: ``85 ms``, ``3.2 s``."""
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 99.95 else f"{value:,.0f} s"


def size(value: float) -> str:
    """An amount of memory in decimal units: ``412 MB``, ``26.4 GB``."""
    return f"{value / 1e9:.1f} GB" if value >= 0.9995e9 else f"{value / 1e6:.0f} MB"


def times(ratio: float) -> str:
    """A ratio: ``2.4x``."""
    return (
        f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x" if ratio >= 1.095 else f"{ratio:.2f}x"
    )


def saving(before: float, after: float) -> str:
    """How much less (or more) it takes: ``2.4x less``."""
    if after > before:
        return f"{times(after / before)} more"
    return f"{times(before / after)} less"


def gap(value: float) -> str:
    """A relative difference: ``1.2e-07``, ``0``."""
    return f"{value:.1e}" if value else "0"


def count(number: int, noun: str) -> str:
    """A number of things: ``1 thread``, ``2 threads``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def power_of_ten(exponent: int) -> str:
    """A power of ten: ``0.1``, ``100``, and ``10⁻⁸`` where that would be long."""
    if -3 <= exponent <= 4:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(_RAISED)


def typeset(text: str) -> str:
    """A text with every ``1.2e-07`` in it written as a number times a power of ten."""

    def raised(match: re.Match[str]) -> str:
        mantissa, exponent = match.groups()
        raised_ten = "10" + str(int(exponent)).translate(_RAISED)
        return raised_ten if mantissa == "1" else f"{mantissa}\N{MULTIPLICATION SIGN}{raised_ten}"

    return re.sub(r"\b(\d+(?:\.\d+)?)e([-+]?\d+)\b", raised, text)
