"""A record of the GPU check, made up: every case of the speed step; and a stub of an event."""

from __future__ import annotations

import time
from typing import Any

from tilelab.cases.case import Case
from tilelab.cases.table import rows
from tilelab.common.files import COMPLETE
from tilelab.gpu_check import speed
from tilelab.gpu_check.record import Record, Row
from tilelab.gpu_check.setting import REAL

MACHINE = {"chip": "Chip 9", "torch": "2.11", "triton": "3.6.0"}


def timed_case(kind: str, width: int, length: int) -> Case:
    """A row of the table as the check times it."""
    found = [*rows("lengths"), *rows("widths"), *rows("one width")]
    return speed.sized(REAL, next(row for row in found if row.name == kind), width, length)


def speed_row(case: Case, direction: str = "forward", rates: dict[str, float] | None = None) -> Row:
    """A row whose ways run at these rates, in tera-units per second."""
    rates = (
        {"ours": 410.0, "cudnn": 590.0, "flex": 390.0, "plain": 40.0} if rates is None else rates
    )
    amount = 4e12
    values: dict[str, Any] = {
        "direction": direction,
        "kind": case.kind,
        "head_dim": case.head_dim,
        "length": case.keys,
        "unit": "TB/s" if case.kind == "decode" else "TFLOP/s",
        "amount": amount,
        "absent": {"flash": "RuntimeError: no kernel"},
        "samples_s": {
            name: [amount / (1e12 * each * factor) for factor in (0.98, 1.0, 1.02)]
            for name, each in rates.items()
        },
    }
    step = "speed" if case in speed.with_goals(REAL) else "lengths"
    return Row(step, f"{direction} {case.name}", "ok", "", values)


def ceilings(matrix: float = 800.0, copy: float = 4.0) -> list[Row]:
    """The two ceilings."""
    return [
        Row(
            "ceilings",
            name,
            values={"amount": 1e12, "unit": unit, "samples_s": {name: [1 / each] * 3}},
        )
        for name, unit, each in (("matrix", "TFLOP/s", matrix), ("copy", "TB/s", copy))
    ]


def whole() -> Record:
    """A record with something of everything."""
    rows = [Row("smoke", "machine", values=dict(MACHINE)), *ceilings()]
    for case in speed.cases(REAL):
        rows.append(speed_row(case))
        if case.passes == "both":
            rows.append(speed_row(case, "backward", {"ours": 250.0, "flex": 300.0}))
    rows += [
        Row("accuracy", f"case {i}", values={"ratios": {"out": 0.1 * i}, "errors": {"out": 1e-3}})
        for i in range(5)
    ]
    took = {"plain": [0.4, 0.3, 0.5], "sdpa": [0.2, 0.2, 0.2], "tilewise": [0.1, 0.1, 0.1]}
    peaks = {"plain": 8_000_000_000, "sdpa": 4_000_000_000, "tilewise": 2_000_000_000}
    rows += [
        Row(
            "training",
            "GPT-2 small",
            values={"tokens": 16384, "context": 1024, "peak_bytes": peaks, "samples_s": took},
        ),
        Row("host", "microseconds", values={"samples_s": {"forward": [3e-5], "torch": [2e-5]}}),
        Row("host", "launches", values={"kernels": {"forward": ["a", "b"]}}),
        Row(
            "host", "graph of both passes", values={"samples_s": {"replay": [1e-5], "call": [9e-5]}}
        ),
        Row(
            "memory",
            "forward",
            values={
                "lengths": [4096, 8192],
                "extra_bytes": [1_000_000, 2_000_000],
                "plain_bytes": [500_000_000],
                "allowed_bytes": [3, 6],
            },
        ),
    ]
    return Record(False, "gpu", COMPLETE, {"smoke": 12.0, "speed": 90.5}, rows)


class Event:
    """A CUDA event of a device that does everything at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)
