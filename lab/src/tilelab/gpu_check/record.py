"""The findings of a run, the numbers and verdicts that follow, their JSON, and their short table.

The goals are for an H200, in bfloat16 unless it says otherwise.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from tilelab.common import files
from tilelab.common.clock import Spread
from tilelab.common.files import COMPLETE, NOT_FINISHED, Finding
from tilelab.common.tables import aligned
from tilewise.errors import Unsupported

# "wrong": it ran and the result is not what it must be. "unsupported": the backend said that it
# cannot. "skipped": there was no time left. "error": it did not come to an end.
Status = Literal["ok", "wrong", "unsupported", "skipped", "error"]
FAILURES: tuple[Status, ...] = ("wrong", "error", "skipped")


@dataclass(frozen=True)
class Row(Finding):
    """One finding."""

    step: str  # of the check
    name: str  # of the finding within its step
    status: Status = "ok"  # how it went
    note: str = ""  # in words, what is wrong or missing
    values: dict[str, Any] = field(default_factory=dict)  # what was measured


_LONGEST_NOTE = 300


def in_short(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, Unsupported):
        reasons = [reason for why in error.reasons.values() for reason in why]
        return "; ".join(reasons or [error.what])[:_LONGEST_NOTE]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_LONGEST_NOTE]


FLEX = "flex"  # as the peers are named


class Goal(NamedTuple):
    """The goals of a case; None where there is no goal."""

    rate: float | None = None  # TFLOP/s; of decoding TB/s
    # Times the speed of compiled FlexAttention, at least. The firm goal.
    over_flex: float | None = None


_LEAST_LENGTH = 8192  # shorter problems have no goal
_RATES = {
    ("forward", "full", 64): 400.0,
    ("forward", "full", 128): 450.0,
    ("forward", "full", 256): 400.0,
    ("forward", "causal", 64): 350.0,
    ("forward", "causal", 128): 400.0,
    ("forward", "causal", 256): 330.0,
    ("forward", "fp8", 128): 600.0,
    ("forward", "decode", 128): 3.6,
    ("backward", "full", 64): 270.0,
    ("backward", "full", 128): 320.0,
    ("backward", "full", 256): 250.0,
    ("backward", "causal", 64): 230.0,
    ("backward", "causal", 128): 290.0,
}
_VARIANTS = ("alibi", "document", "window")


def goal_for(direction: str, kind: str, head_dim: int, length: int) -> Goal:
    """Return the goal of a speed case, of a kind of mask or score such as ``"causal"``."""
    if length < _LEAST_LENGTH:
        return Goal()
    firm = kind in _VARIANTS or (direction == "backward" and kind in ("full", "causal"))
    return Goal(_RATES.get((direction, kind, head_dim)), 1.0 if firm else None)


OURS = ("ours", "table")  # with a BlockMask, where there are two ways
_TERA = 1e12


def rate(row: Row, name: str) -> Spread | None:
    """Tera-operations (or terabytes) per second of one way; None where it was not timed."""
    samples = row.values.get("samples_s", {}).get(name)
    if not samples:
        return None
    return Spread.of([row.values["amount"] / seconds / _TERA for seconds in samples])


def best(row: Row) -> Spread | None:
    """Return the faster of our ways."""
    found = [spread for name in OURS if (spread := rate(row, name)) is not None]
    return max(found, key=lambda spread: spread.median, default=None)


def ceiling(rows: Sequence[Row], unit: str) -> Spread | None:
    """Return the GPU's ceiling in a unit; None where it was not measured."""
    for row in rows:
        if row.step == "ceilings" and row.values.get("unit") == unit:
            return rate(row, row.name)
    return None


def fraction(rows: Sequence[Row], row: Row) -> float | None:
    """Our share of the ceiling."""
    ours, most = best(row), ceiling(rows, row.values.get("unit", ""))
    return None if ours is None or most is None else ours.median / most.median


def goal(row: Row) -> Goal:
    """Return the goal of what was timed beside others; of anything else an empty one."""
    values = row.values
    if "direction" not in values or "dtype" in values:
        return Goal()
    return goal_for(values["direction"], values["kind"], values["head_dim"], values["length"])


def met(row: Row) -> str:
    """Yes, or no and what is missed; empty where there is no goal or nothing to judge by."""
    wanted, ours, flex = goal(row), best(row), rate(row, FLEX)
    if ours is None or wanted == Goal():
        return ""
    missed, judged = [], False
    if wanted.rate is not None:
        judged = True
        if ours.median < wanted.rate:
            missed.append("rate")
    if wanted.over_flex is not None and flex is not None:
        judged = True
        if ours.median < wanted.over_flex * flex.median:
            missed.append("flex")
    if missed:
        return f"no: {', '.join(missed)}"
    return "yes" if judged else ""


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the timed cases as numbers, for people and other programs."""
    return [
        {
            "name": row.name,
            "unit": row.values["unit"],
            "rates": {name: rate(row, name) for name in row.values["samples_s"]},
            "fraction": fraction(rows, row),
            "goal": goal(row)._asdict(),
            "met": met(row),
        }
        for row in rows
        if "direction" in row.values and row.values.get("samples_s")
    ]


ONLY = "only "  # the steps that were asked for


@dataclass
class Record(files.Record):
    """The results of a run, while it goes on and afterwards."""

    FORMAT = 1
    KIND = "a JSON file of the GPU check"
    LISTS: ClassVar = {"rows": Row}

    self_test: bool  # nothing in it is a measurement
    backend: str  # that was asked
    # ``"complete"``, ``"only "`` and some steps, or why not everything is there.
    status: str = NOT_FINISHED
    seconds: dict[str, float] = field(default_factory=dict)  # of every step
    rows: list[Row] = field(default_factory=list)  # the findings

    def of(self, step: str) -> list[Row]:
        """Return the rows of a step."""
        return [row for row in self.rows if row.step == step]

    def find(self, step: str, name: str) -> Row | None:
        """Return the first row of that name."""
        return next((row for row in self.of(step) if row.name == name), None)

    def end(self, part: str = "") -> None:
        """The steps are over; ``part`` says which there were, where they were not all."""
        skipped = sum(row.status == "skipped" for row in self.rows)
        whole = ONLY + part if part else COMPLETE
        self.status = f"{skipped} jobs had no time" if skipped else whole

    @property
    def finished(self) -> bool:
        """Whether every requested job was begun."""
        return self.status == COMPLETE or self.status.startswith(ONLY)

    @property
    def failures(self) -> list[Row]:
        """Return the rows that are wrong, did not end or were not begun."""
        return [row for row in self.rows if row.status in FAILURES]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and the timed cases as numbers."""
        return super().as_json() | {"summary": summary(self.rows)}


_PEERS = ("cudnn", "flash", "efficient", "flex", "plain")
_MOST_FAILURES, _MOST_DECLINED, _NOTE = 12, 8, 110


def table(record: Record) -> str:
    """Return everything that people read first; the rest is in the JSON."""
    parts = [_heading(record)]
    if not record.self_test:
        parts += [_speed(record), _training(record), _host(record), _memory(record), _bytes(record)]
    declined = [row for row in record.rows if row.status == "unsupported"]
    parts += [_steps(record), _failures(record), _by_reason(declined, _MOST_DECLINED)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


def _heading(record: Record) -> Iterator[str]:
    found = record.find("smoke", "machine")
    machine = found.values if found is not None else {}
    where = f"{machine.get('chip', 'unknown chip')}, torch {machine.get('torch', '?')}"
    yield f"{where}, Triton {machine.get('triton', '?')}; {sum(record.seconds.values()):.0f} s"
    if record.self_test:
        yield f"Self-test of backend {record.backend!r}: tiny shapes; no number is a measurement."
    if record.status != COMPLETE:
        yield f"NOT EVERYTHING IS HERE: {record.status}."
    for unit, what in (("TFLOP/s", "matrix product"), ("TB/s", "copy")):
        most = ceiling(record.rows, unit)
        if most is not None and not record.self_test:
            yield f"Ceiling, {what}: {most.median:.4g} {unit} [{most.low:.4g}, {most.high:.4g}]"


def _speed(record: Record) -> Iterator[str]:
    timed = [row for step in ("speed", "lengths", "dtypes") for row in record.of(step)]
    rows = [row for row in timed if row.values.get("samples_s")]
    if not rows:
        return
    yield "Speed, medians, TFLOP/s (decode TB/s); +- half the range; % of the ceiling"
    lines: list[tuple[str, ...]]
    lines = [("case", "ours", "+-", "%", *(name[:5] for name in _PEERS), "goal", "met")]
    lines += [_speed_cells(record, row) for row in rows]
    yield from aligned(lines, {0}, " ")
    judged = [word for row in rows if (word := met(row))]
    if judged:
        yield f"Goals met: {judged.count('yes')} of {len(judged)}."


def _speed_cells(record: Record, row: Row) -> tuple[str, ...]:
    values = row.values
    length = values["length"]
    short = f"{length // 1024}k" if length % 1024 == 0 else str(length)
    way = "fwd" if values["direction"] == "forward" else "bwd"
    ours, share, wanted = best(row), fraction(record.rows, row), goal(row)
    peers = [spread.median if (spread := rate(row, name)) else None for name in _PEERS]
    goals = [f"{wanted.rate:g}" if wanted.rate else "", "flex" if wanted.over_flex else ""]
    return (
        f"{way} D{values['head_dim']} {values['kind']} {short} {values.get('dtype', '')}".rstrip(),
        "-" if ours is None else f"{ours.median:.3g}",
        "" if ours is None else f"{(ours.high - ours.low) / 2 / ours.median:.0%}",
        "" if share is None else f"{100 * share:.0f}",
        *("" if peer is None else f"{peer:.3g}" for peer in peers),
        ",".join(filter(None, goals)),
        met(row) if row.status == "ok" else row.status.upper(),
    )


def _training(record: Record) -> Iterator[str]:
    rows = [row for row in record.of("training") if row.values.get("samples_s")]
    if not rows:
        return
    yield "Training step: thousand tokens/s (GB at the peak)"
    lines: list[tuple[str, ...]]
    lines = [("model", "plain", "sdpa", "tilewise", "x plain", "x sdpa")]
    for row in rows:
        took = {name: statistics.median(each) for name, each in row.values["samples_s"].items()}
        tokens, peaks, ours = row.values["tokens"], row.values["peak_bytes"], took.get("tilewise")
        speeds = {
            name: f"{tokens / seconds / 1e3:.0f} ({peaks[name] / 1e9:.1f})"
            for name, seconds in took.items()
        }
        over = {name: f"{seconds / ours:.2f}" for name, seconds in took.items() if ours}
        cells = [speeds.get(name, "-") for name in ("plain", "sdpa", "tilewise")]
        cells += [over.get(name, "") for name in ("plain", "sdpa")]
        lines.append((f"{row.name} {row.values['context']}", *cells))
    yield from aligned(lines, {0}, " ")


def _host(record: Record) -> Iterator[str]:
    found = record.find("host", "microseconds")
    if found is not None and found.values:
        took = {name: statistics.median(each) for name, each in found.values["samples_s"].items()}
        said = "; ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in took.items())
        yield f"Host, microseconds a call: {said}"
    found = record.find("host", "launches")
    if found is not None and found.values:
        counts = [f"{name} {len(each)}" for name, each in found.values["kernels"].items()]
        yield f"Kernel launches: {'; '.join(counts)}"
    for row in record.of("host"):
        samples = row.values.get("samples_s", {})
        if "replay" in samples:
            times = [f"{statistics.median(samples[k]) * 1e6:.0f}" for k in ("replay", "call")]
            yield f"{row.name}: replay {times[0]} us, call {times[1]} us"


def _memory(record: Record) -> Iterator[str]:
    for row in record.of("memory"):
        values = row.values
        if not values:
            continue
        sizes = ", ".join(f"{size / 1e6:.1f}" for size in values["extra_bytes"])
        lengths = ", ".join(f"{length // 1024}k" for length in values["lengths"])
        line = f"Memory beyond results, {row.name}: {sizes} MB at N = {lengths}"
        if values["plain_bytes"]:
            at = values["lengths"][len(values["plain_bytes"]) - 1] // 1024
            line += f"; plain {values['plain_bytes'][-1] / 1e6:.0f} MB at {at}k"
        yield line


def _bytes(record: Record) -> Iterator[str]:
    for row in record.of("traffic"):
        values = row.values
        if not values.get("read"):
            continue
        off = values["predicted_read"] / values["read"] - 1
        said = f"Bytes of memory by ncu, {row.name}: {values['read'] / 1e6:.0f} MB read"
        yield (
            f"{said}, predicted {values['predicted_read'] / 1e6:.0f} ({off:+.0%}); "
            f"{values['written'] / 1e6:.0f} written, predicted "
            f"{values['predicted_written'] / 1e6:.0f}"
        )


def _steps(record: Record) -> Iterator[str]:
    for name in dict.fromkeys(row.step for row in record.rows):
        rows = record.of(name)
        counts = Counter(row.status for row in rows)
        order: tuple[Status, ...] = ("ok", "wrong", "unsupported", "error", "skipped")
        said = ", ".join(f"{counts[each]} {each}" for each in order if counts[each])
        ratios = [ratio for row in rows for ratio in _ratios(row)]
        worst = f"; at worst {max(ratios):.2f} of the allowed error" if ratios else ""
        yield f"{name}: {said}; {record.seconds.get(name, 0.0):.0f} s{worst}"


def _ratios(row: Row) -> list[float]:
    if row.status == "wrong":
        return []
    found = row.values.get("ratios", {}).values()
    return [ratio for ratio in found if ratio is not None]


def _failures(record: Record) -> Iterator[str]:
    rows = [row for row in record.failures if row.status != "skipped"]
    skipped = [row for row in record.failures if row.status == "skipped"]
    yield from _by_reason(rows, _MOST_FAILURES)
    if skipped:
        steps = ", ".join(dict.fromkeys(row.step for row in skipped))
        yield f"SKIPPED for want of time: {len(skipped)} jobs of {steps}"


def _by_reason(rows: Sequence[Row], most: int) -> Iterator[str]:
    """Yield one line for rows of one status and note."""
    reasons: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        reasons.setdefault((row.status, row.note), []).append(row)
    for (status, note), found in list(reasons.items())[:most]:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        said = status if status == "unsupported" else status.upper()
        yield f"{said} {found[0].step}, {found[0].name}{more}: {note[:_NOTE]}"
    if len(reasons) > most:
        yield f"... and {len(reasons) - most} other reasons in the JSON"
