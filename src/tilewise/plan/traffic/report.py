"""An account in words: the lines that ``tilewise explain`` prints of it."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.chips import Chip
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import Account, Comparison, trains
from tilewise.plan.traffic.count import Seconds, Traffic, balance

_BOUND = {
    "memory": "memory-bound",
    "matrix": "bound by matrix products",
    "exponential": "bound by exponentials",
}


def amount(count: float, unit: str = "B") -> str:
    """1234567 -> "1.23 MB": three digits, decimal prefixes."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5 or prefix == "P":
            digits = f"{count:.3g}" if prefix else f"{count:.4g}"
            return f"{digits} {prefix}{unit}"
        count /= 1000
    raise AssertionError("the last prefix takes everything")


def duration(seconds: float) -> str:
    """0.00123 -> "1.23 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError("the last unit takes everything")


def lines(account: Account, chip: Chip | None, training: bool = True) -> list[tuple[str, str]]:
    """Return what there is to say of an account, as (name, text) pairs.

    Args:
        account: of the problem.
        chip: whose ceilings and caches count; None where it is not known.
        training: whether the backward is told of too.
    """
    training = training and trains(account.problem)
    found = [("chip", _chip_line(chip, account))]
    directions = [("forward", account.forward)]
    if training:
        directions.append(("backward", account.backward))
    for name, comparison in directions:
        found += _direction(name, comparison, account, chip)
    visits = account.visits
    if visits.density < 1:
        found.append(("density", f"{visits.density:.3g} of the pairs are in visited tiles"))
    held = account.held(training)
    if held is not None:
        ours, plain = held
        saved = f", {plain / ours:.3g} times less" if ours else ""
        found.append(("memory", f"{amount(ours)} held, plain {amount(plain)}{saved}"))
    omitted = dict.fromkeys(account.both.ours.omitted + account.both.plain.omitted)
    if omitted:
        found.append(("omitted", "; ".join(omitted)))
    return found


def lead(account: Account, chip: Chip | None) -> str:
    """Return the one ratio that matters, in a sentence: of times, else of bytes."""
    ours, plain = account.forward
    try:
        if chip is not None:
            least, other = (account.seconds(each, chip).total for each in (ours, plain))
            if least:
                return (
                    f"{other / least:.3g}x faster than plain attention: {duration(least)} and "
                    f"{duration(other)} at best for the forward pass"
                )
    except InvalidArgument:
        pass  # a ceiling of the chip is not known; the bytes are
    reaching = ours if chip is None else account.reaching(ours, chip)
    if not reaching.bytes:
        return ""
    return (
        f"{plain.bytes / reaching.bytes:.3g}x fewer bytes than plain attention: "
        f"{amount(reaching.bytes)} and {amount(plain.bytes)} for the forward pass"
    )


def _chip_line(chip: Chip | None, account: Account) -> str:
    if chip is None:
        return "not in the table of chips: no time is predicted"
    dtype = account.dtype
    try:
        ridge = balance(chip, dtype)
    except InvalidArgument as error:
        return f"{chip.name}; no time is predicted without {error.required}. {error.fix}".strip()
    peak = chip.peak(dtype) or 0.0
    bandwidth = amount(chip.bandwidth_bytes_s or 0.0, "B/s")
    return (
        f"{chip.name}: {bandwidth}, {amount(peak, 'FLOP/s')} in {dtype}, "
        f"ridge at {ridge:.3g} FLOP/B"
    )


def _direction(
    name: str, comparison: Comparison, account: Account, chip: Chip | None
) -> list[tuple[str, str]]:
    ours, plain = comparison
    text = f"tiles move {amount(ours.bytes)}, plain {amount(plain.bytes)}{_times(plain, ours)}"
    if chip is None:
        return [(name, text)]
    reaching = account.reaching(ours, chip)
    text = (
        f"{amount(reaching.bytes)} to memory (tiles move {amount(ours.bytes)}), "
        f"plain {amount(plain.bytes)}{_times(plain, reaching)}"
    )
    found = [(name, text)]
    try:
        seconds, other = (account.seconds(each, chip) for each in comparison)
    except InvalidArgument:
        return found
    side = "right" if reaching.intensity > balance(chip, account.dtype) else "left"
    rate = ours.flops / seconds.total if seconds.total else 0.0
    return [
        *found,
        (
            "",
            f"{duration(seconds.total)} (lower bound), plain {duration(other.total)} "
            f"(lower bound): {_bounds(seconds)}",
        ),
        (
            "",
            f"{reaching.intensity:.4g} FLOP/B, {side} of the ridge; "
            f"at most {amount(rate, 'FLOP/s')}; plain {plain.intensity:.3g} FLOP/B",
        ),
    ]


def _times(plain: Traffic, ours: Traffic) -> str:
    return f" ({plain.bytes / ours.bytes:.3g} times as much)" if ours.bytes else ""


def _bounds(seconds: Seconds) -> str:
    shares: Sequence[tuple[str, float]] = (
        ("memory", seconds.memory),
        ("matrix", seconds.matrix),
        ("exponentials", seconds.exponential),
    )
    each = ", ".join(f"{name} {duration(share)}" for name, share in shares)
    return f"{_BOUND[seconds.bound]} ({each})"
