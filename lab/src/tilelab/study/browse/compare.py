"""``tilewise study compare A B``: two arms, two runs or two studies, seed by seed.

A difference is B less A. Only seeds that both have finished are compared. The same seed means the
same first weights and batches, if model and data are the same too. The comparison prints what
differs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from tilelab.common.terminal import say
from tilelab.stats.paired import paired, ratio
from tilelab.study.ask.metrics import METRICS
from tilelab.study.browse import show
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import flat
from tilelab.study.verdict.measures import final_metric, measure, task_metrics
from tilelab.study.verdict.text import amount, count
from tilewise.errors import InvalidArgument

_CONFIDENCE = 0.95
Reading = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class Pairs:
    """The finished runs of two sides."""

    first: dict[int, RunRecord]  # by seed
    second: dict[int, RunRecord]  # by seed

    @property
    def seeds(self) -> list[int]:
        """The seeds that both have."""
        return sorted(self.first.keys() & self.second.keys())

    def of(self, reading: Reading) -> list[tuple[float, float]]:
        """Return a measure of both sides at each common seed, where both have it."""
        both = [(reading(self.first[seed]), reading(self.second[seed])) for seed in self.seeds]
        return [(a, b) for a, b in both if a is not None and b is not None]


def pairs(first: Mapping[str, RunRecord], second: Mapping[str, RunRecord]) -> Pairs:
    """Return the final runs of two arms by seed; trials of sweeps and diverged runs do not count.

    A single run on each side is a pair whatever the seeds are.
    """
    sides = [
        {
            record.start.seed: record
            for record in side.values()
            if record.start.phase == "final" and record.done and not record.diverged
        }
        for side in (first, second)
    ]
    if all(len(side) == 1 for side in (first, second)) and all(map(len, sides)):
        sides = [{0: next(iter(side.values()))} for side in sides]
    return Pairs(*sides)


def compare(first: show.Found, second: show.Found, console: Console) -> None:
    """Print how B differs from A, arm by arm."""
    for side in (first, second):
        show.say_damaged(side.damaged, console)
    one, other = _by_arm(first), _by_arm(second)
    if len(one) == len(other) == 1:
        matched = [(next(iter(one)), next(iter(other)))]
    else:
        matched = [(arm, arm) for arm in one if arm in other]
    if not matched:
        came = f"{first.name} and {second.name}, which have no arm in common"
        raise InvalidArgument("compare", came, "two arms, two runs, or studies with equal arms")
    say(console, f"A: {first.name}\nB: {second.name}")
    held_a, held_b = first.withheld(), second.withheld()
    for a, b in matched:
        title = a if a == b else f"{a} (A) and {b} (B)"
        held = {arm: why[arm] for arm, why in ((a, held_a), (b, held_b)) if arm in why}
        _compare_arms(title, one[a], other[b], held, console)


def _by_arm(found: show.Found) -> dict[str, dict[str, RunRecord]]:
    """Final runs by ``experiment/arm``, in the order of their names."""
    arms: dict[str, dict[str, RunRecord]] = {}
    for name, record in found.records.items():
        if record.start.phase == "final" or name == found.part:
            arms.setdefault(show.arm_of(name), {})[name] = record
    return arms


def _compare_arms(
    title: str,
    first: Mapping[str, RunRecord],
    second: Mapping[str, RunRecord],
    held: Mapping[str, str],
    console: Console,
) -> None:
    say(console, f"\n{title}", style="bold")
    for line in _differences(first, second):
        say(console, f"  {line}")
    found = pairs(first, second)
    if not found.seeds:
        say(console, "  No seed is finished in both: nothing is compared.")
        return
    console.print(_table(found, timed=not held))
    reasons = [f"{arm}: {why}" for arm, why in held.items()]
    for line in (*_remarks(first, second, found), *reasons):
        say(console, f"  {line}")


def _table(found: Pairs, timed: bool) -> Table:
    table = show.table_of("measure", "A", "B", "B - A", "95 % interval", "p", left=("measure",))
    both = found.of(lambda record: measure(record)["loss"])
    show.add_row(table, "loss, nats per token", *_loss_cells(both))
    for name in ("bits_per_byte", *sorted(task_metrics(map(measure, found.first.values())))):
        both = found.of(partial(final_metric, metric=name))
        show.add_row(table, METRICS[name].unit, *_loss_cells(both))
    both = found.of(lambda record: measure(record)["tokens_per_s"])
    speeds = _ratio_cells(both, lambda value: f"{value:,.0f}") if timed else [show.WITHHELD] * 3
    show.add_row(table, "tokens/s", *speeds)
    both = found.of(lambda record: record.memory.peak_bytes if record.memory else None)
    show.add_row(table, "peak memory", *_ratio_cells(both, amount))
    return table


def _loss_cells(both: list[tuple[float, float]]) -> list[str]:
    if not both:
        return []
    test = paired([b - a for a, b in both], _CONFIDENCE)
    interval = test.interval
    return [
        *_means(both, lambda value: f"{value:.4f}"),
        "" if test.mean is None else show.difference(test.mean),
        f"[{show.difference(interval.low)}, {show.difference(interval.high)}]" if interval else "",
        show.number(test.p_value, ".2g"),
    ]


def _ratio_cells(both: list[tuple[float, float]], form: Callable[[float], str]) -> list[str]:
    factor = ratio([(b, a) for a, b in both], _CONFIDENCE)
    if factor is None:
        return []
    interval = factor.interval
    return [
        *_means(both, form),
        f"x{factor.value:.3f}",
        f"[x{interval.low:.3f}, x{interval.high:.3f}]" if interval else "",
    ]


def _means(both: list[tuple[float, float]], form: Callable[[float], str]) -> tuple[str, str]:
    return form(statistics.fmean(a for a, _ in both)), form(statistics.fmean(b for _, b in both))


def _differences(first: Mapping[str, RunRecord], second: Mapping[str, RunRecord]) -> list[str]:
    a, b = (next(iter(side.values())).start for side in (first, second))
    one, other = dict(flat(a.config)), dict(flat(b.config))
    lines = [
        f"{path}: {_said(one.get(path))} in A, {_said(other.get(path))} in B"
        for path in dict.fromkeys((*one, *other))
        if one.get(path) != other.get(path)
    ]
    if a.corpus.get("sha256") != b.corpus.get("sha256"):
        lines.append("The texts are not the same: losses are not comparable.")
    return lines


def _said(value: Any) -> str:
    return "not there" if value is None else str(value)


def _remarks(
    first: Mapping[str, RunRecord], second: Mapping[str, RunRecord], found: Pairs
) -> list[str]:
    lines = [f"{count(len(found.seeds), 'paired seed')}."]
    for side, records in (("A", first), ("B", second)):
        left_out = [
            f"{name} ({'diverged' if record.diverged else 'not done'})"
            for name, record in records.items()
            if not record.done or record.diverged
        ]
        if left_out:
            lines.append(f"Left out of {side}: {', '.join(left_out)}.")
    a, b = _kernels(found.first), _kernels(found.second)
    if a != b:
        lines.append(f"Attention kernels: {_list(a)} in A, {_list(b)} in B.")
    sides = (found.first, found.second)
    mine, theirs = ([side[seed].weights_sha256 for seed in found.seeds] for side in sides)
    if mine == theirs and all(mine):  # of a script nobody knows
        lines.append("The final weights are the same to the last bit.")
    return lines


def _kernels(records: Mapping[int, RunRecord]) -> set[str]:
    return {
        layer.kernel
        for record in records.values()
        for layer in (record.kernels.layers if record.kernels else ())
    }


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "unknown"
