"""Numbers and lists as people read them, the same in verdicts, on the page and in the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from tilelab.stats.values import effect_text as effect_text
from tilelab.stats.values import interval_text as interval_text
from tilelab.stats.values import listing as listing
from tilelab.stats.values import p_text as p_text
from tilelab.stats.values import seeds_text as seeds_text
from tilewise.plan.traffic.report import amount as amount

MINUS = "\N{MINUS SIGN}"
_LARGE = 1e15  # a power of ten reads better from there
_RAISED = str.maketrans(
    "-0123456789",
    "\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}"
    "\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT FOUR}\N{SUPERSCRIPT FIVE}\N{SUPERSCRIPT SIX}"
    "\N{SUPERSCRIPT SEVEN}\N{SUPERSCRIPT EIGHT}\N{SUPERSCRIPT NINE}",
)


def digits_for(scale: float) -> int:
    """Decimals that show a number of that size to three figures, e.g. 4 for 0.0123; 0 to 6."""
    if not scale or not math.isfinite(scale):
        return 3
    return min(max(2 - math.floor(math.log10(abs(scale))), 0), 6)


def plain(value: float, digits: int) -> str:
    """Return a number with that many decimals and a real minus sign; ``∞`` where it has no end."""
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else f"{MINUS}\N{INFINITY}"
    if abs(value) >= _LARGE:
        return typeset(f"{value:.3g}")
    text = f"{value:,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def signed(value: float, digits: int) -> str:
    """Return the same with its sign: ``+0.012``; a zero has none."""
    text = plain(value, digits)
    return f"+{text}" if value > 0 and any(c in "123456789\N{INFINITY}" for c in text) else text


def power(value: float) -> str:
    """Return a small number as a power of ten: ``+4`` times ten to the minus sixth; ``0`` stays."""
    if value == 0 or not math.isfinite(value):
        return signed(value, 0)
    return typeset(f"{value:+.0e}")


def typeset(sentence: str) -> str:
    """Return a sentence with real minus signs, and powers of ten in place of ``1e-06``."""

    def raised(match: re.Match[str]) -> str:
        exponent = str(int(match[2])).translate(_RAISED)
        return f"{match[1]}\N{MULTIPLICATION SIGN}10{exponent}"

    powers = re.sub(r"\b(\d+(?:\.\d+)?)e([-+]?\d+)\b", raised, sentence)
    return re.sub(r"(?<![\w.)])-(?=\d)", MINUS, powers)


def p_value(p: float | None) -> str:
    """``0.034``, ``< 0.0001``; a dash where there is none."""
    if p is None:
        return "\N{EN DASH}"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def duration(seconds: float) -> str:
    """Return a time: ``85 ms``, ``3.2 s``, ``4 min 10 s``, ``2 h 05 min``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02} min"


def rate(value: float) -> str:
    """Things per second: ``12,300``, ``3.21``."""
    if value < 0.005:
        return "0"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def ratio(value: float) -> str:
    """Return a ratio to three figures and a times sign, e.g. of 2.41 or 12.3."""
    digits = 0 if value >= 99.5 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}\N{MULTIPLICATION SIGN}"


def times(value: float, more: str, less: str) -> str:
    """Return a ratio in words, e.g. of speed: faster, slower, ``as fast``."""
    if abs(math.log(value)) < 0.005:
        return "as fast"
    return f"{ratio(max(value, 1 / value))} {more if value > 1 else less}"


def integer(number: int | float) -> str:
    """Return a whole number of anything: ``1,228,800``."""
    return f"{number:,.0f}"


def shorten(number: float) -> str:
    """Return a number for the axis of a figure: ``250``, ``1.2M``, ``0.5``."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}".replace("-", MINUS)
    return f"{number:.3g}".replace("-", MINUS)


def count(number: int, noun: str) -> str:
    """Return a number of things: ``1 seed``, ``3 seeds``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def fixed(digits: int) -> Callable[[float], str]:
    """Return ``plain`` with that many decimals."""
    return lambda number: plain(number, digits)


def percent(share: float) -> str:
    """Return a share of 1 as ``12.3 %``."""
    return f"{share * 100:.3g} %" if share >= 5e-6 else "0 %"


def layers_text(layers: Sequence[int], count: int) -> str:
    """``Layer 2``, ``Layers 0 to 3 and 6``, ``All layers``; at the head of a sentence."""
    if len(layers) == count > 1:
        return "All layers"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"{'Layer' if len(layers) == 1 else 'Layers'} {listing(parts)}"
