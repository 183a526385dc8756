"""Numbers as people read them, the same in the report and on the terminal."""

from __future__ import annotations


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
