"""The short table: what was found, in some 10,000 characters at most."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tilelab.common.record import COMPLETE
from tilelab.common.tables import aligned
from tilelab.gpu_check.record import Record, Row, best, ceiling, fraction, goal, met, rate

_PEERS = ("cudnn", "flash", "efficient", "flex", "plain")
_MOST_FAILURES, _MOST_DECLINED, _NOTE = 12, 8, 110


def table(record: Record) -> str:
    """Return everything that people read first; the rest is in the JSON."""
    parts = [_heading(record)]
    if not record.self_test:
        parts += [_speed(record), _training(record), _host(record), _memory(record), _bytes(record)]
    parts += [_steps(record), _failures(record), _declined(record)]
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
        lines.append(
            (
                f"{row.name} {row.values['context']}",
                *(
                    f"{tokens / took[name] / 1e3:.0f} ({peaks[name] / 1e9:.1f})"
                    if name in took
                    else "-"
                    for name in ("plain", "sdpa", "tilewise")
                ),
                *(
                    f"{took[name] / ours:.2f}" if ours and name in took else ""
                    for name in ("plain", "sdpa")
                ),
            )
        )
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
    names = list(dict.fromkeys([row.step for row in record.rows]))
    for name in names:
        rows = record.of(name)
        counts = dict.fromkeys(("ok", "wrong", "unsupported", "error", "skipped"), 0)
        for row in rows:
            counts[row.status] += 1
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
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


def _declined(record: Record) -> Iterator[str]:
    """Yield what the backend says that it cannot do."""
    rows = [row for row in record.rows if row.status == "unsupported"]
    yield from _by_reason(rows, _MOST_DECLINED)


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
