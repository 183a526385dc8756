"""The cases that run under cachegrind, the model's predictions, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch

import tilewise
from tilelab.cases import case as cases
from tilelab.cases.inputs import build, problem_of
from tilelab.counted import fills
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import plain
from tilewise.plan.traffic.count import Traffic
from tilewise.problem import Problem

Method: TypeAlias = Literal["core", "plain"]
Direction: TypeAlias = Literal["forward", "backward"]

_LARGEST_TASK = 512  # queries of a task where threads do not ask for smaller ones


@dataclass(frozen=True)
class Case:
    """One attention behind one cache, float32, one batch item: a run of the native driver.

    It is no row of ``cases.table``, since its fields are the driver's arguments and the stored
    JSON's, and most of its rows are one attention behind other caches.
    """

    method: Method  # the C++ core, or plain attention
    direction: Direction  # of the pass
    length: int  # queries and keys
    cache: int  # bytes of the last-level cache
    heads: int = 1  # these two: Hq and Hk
    kv_heads: int = 1
    width: int = 64  # D and Dv
    causal: bool = False  # whether later keys are masked; the core only
    # Queries that walk together over the keys in the core's forward: 64 to 512.
    task: int = _LARGEST_TASK
    listed: int = 0  # keys of each query's list, which its heads share; 0: no lists

    def __post_init__(self) -> None:
        if self.method == "plain" and (self.heads != self.kv_heads or self.causal):
            raise InvalidArgument(
                "method", "plain with a mask or groups of heads", "as many key heads, and no mask"
            )
        if self.listed and (self.direction == "backward" or self.kv_heads > 1 or self.causal):
            raise InvalidArgument(
                "listed",
                f"{self.listed} keys, with a mask, a backward or several key heads",
                "the forward of one key head without a mask",
            )

    @property
    def problem(self) -> Problem:
        """The problem of the case."""
        sizes = (1, self.heads, self.kv_heads, self.length, self.length, self.width, self.width)
        attention = cases.Case(self.name, *sizes, mask=("causal",) * self.causal)
        problem, _ = problem_of(build(attention, device="meta"), None)
        return problem._replace(device="cpu")

    @property
    def name(self) -> str:
        """The case in words."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        words = [self.method, self.direction, f"N {self.length}, H {heads}, D {self.width}"]
        words += ["causal"] * self.causal
        if self.listed:
            words.append(f"lists of {self.listed}")
        elif self.method == "core" and self.direction == "forward":
            words.append(f"tasks of {self.task}")
        return ", ".join([*words, f"{self.cache >> 10} KiB"])

    @property
    def threads(self) -> int:
        """Threads for which the core cuts tasks of this size, in ``csrc/passes/forward.h``.

        Raises:
            InvalidArgument: for none.
        """
        if self.task == _LARGEST_TASK:
            return 1
        tasks = self.heads * -(-self.length // self.task)
        if self.task not in (64, 128, 256) or tasks < 8:
            raise InvalidArgument(
                "task", f"{self.task} with {tasks} tasks", "512, or 64, 128 or 256 with 8 or more"
            )
        return tasks // 4

    @property
    def arguments(self) -> dict[str, str | int]:
        """Arguments of the native driver, except what it runs."""
        return {
            "pass": self.direction,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "queries": self.length,
            "keys": self.length,
            "head_dim": self.width,
            "causal": int(self.causal),
            "listed": self.listed,
            "threads": self.threads if self.method == "core" else 1,
            "flush": 2 * self.cache,
        }

    def predicted(self) -> Traffic:
        """Predict the fills by pass and operand, by the model."""
        problem = self.problem
        if self.listed:
            q, k = (torch.empty(1, h, self.length, self.width) for h in (self.heads, 1))
            lists = torch.zeros(1, 1, self.length, self.listed, dtype=torch.int32)
            found = tilewise.explain(q, k, k, keys=lists, backend="cpu").account
            assert found is not None
            return found.forward.ours
        if self.method == "core":
            if self.direction == "forward":
                return fills.core_forward(problem, self.task, self.cache)
            return fills.core_backward(problem, self.cache)
        made = plain.forward(problem) if self.direction == "forward" else plain.backward(problem)
        return fills.fills(made, self.cache)

    @property
    def allowed(self) -> float:
        """The largest relative difference between counted and predicted that is accepted."""
        return 0.15 if self.method == "core" else 0.20


def _core(direction: Direction, length: int, kib: int, **more: Any) -> Case:
    return Case("core", direction, length, kib << 10, **more)


def _plain(direction: Direction, length: int, kib: int, **more: Any) -> Case:
    return Case("plain", direction, length, kib << 10, **more)


# Of seconds each: what continuous integration runs.
QUICK: tuple[Case, ...] = (
    _plain("forward", 512, 256),
    _plain("backward", 512, 256),
    _plain("forward", 256, 128, heads=2, kv_heads=2, width=32),
    _core("forward", 512, 192, task=64),  # keys come again for every task
    _core("forward", 512, 512, task=64),  # they stay
    _core("forward", 512, 256),  # the task does not fit: it comes again for every block of keys
    _core("forward", 512, 192, heads=4, kv_heads=2, width=32, task=128),
    _core("forward", 1024, 192, width=32, task=128, causal=True),
    _core("backward", 512, 224, width=32),
    _core("backward", 512, 512, width=32),
    _core("forward", 1024, 192, heads=8, listed=64),
)

CASES: tuple[Case, ...] = (
    *QUICK,
    _plain("forward", 1024, 512),
    _plain("backward", 256, 128, heads=2, kv_heads=2, width=32),
    _plain("forward", 512, 4096),  # everything fits
    _core("forward", 256, 512, heads=2, kv_heads=2, width=32, task=64),
    _core("forward", 512, 512),
    _core("forward", 512, 320, heads=4, kv_heads=2, width=32, task=128),
    _core("forward", 1024, 256, width=32, task=128),
    _core("forward", 1024, 512, width=32, task=128),
    _core("forward", 1024, 256, heads=2, kv_heads=2, width=32, task=256),
    _core("forward", 1024, 512, width=32, task=128, causal=True),
    _core("backward", 512, 512),
    _core("backward", 512, 1024),
    _core("forward", 1024, 256, width=32, task=128, causal=True),  # the short walks stay
    _core("backward", 512, 256, heads=2, kv_heads=1, width=32, causal=True),
    _core("backward", 512, 512, heads=2, kv_heads=1, width=32, causal=True),
    # Twice the keys of a list, and as long a list of twice as many keys
    _core("forward", 1024, 192, heads=8, listed=128),
    _core("forward", 2048, 192, heads=8, listed=64),
)

# One attention behind smaller and smaller caches, near the edges too, where nothing is promised.
_KIB = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024, 2048, 4096)
SWEEP: tuple[Case, ...] = (
    *(_plain("forward", 512, kib) for kib in _KIB if kib >= 192),
    *(_core("forward", 512, kib, task=64) for kib in _KIB if kib <= 1024),
    *(_core("forward", 512, kib) for kib in _KIB if 128 <= kib <= 1024),
    *(_core("forward", 1024, k, width=32, task=128, causal=True) for k in _KIB if 128 <= k <= 1024),
)


@dataclass(frozen=True)
class Row:
    """One case."""

    case: Case  # what ran
    counted: int  # bytes of the lines that its last-level misses fetched
    predicted: int  # bytes that the model says

    @property
    def off(self) -> float:
        """The excess of the prediction over the count, as a share of the count."""
        return self.predicted / self.counted - 1

    @property
    def holds(self) -> bool:
        """Whether the excess is within the limit of the case."""
        return abs(self.off) <= self.case.allowed

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {"case": asdict(self.case), "counted": self.counted, "predicted": self.predicted}

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Row:
        """Read a stored count, and predict it again with today's model."""
        case = Case(**stored["case"])
        return cls(case, stored["counted"], case.predicted().bytes)


_HEAD = (
    "| | pass | N | heads | D | cache, KiB | counted, MB | predicted, MB | off by |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table(rows: Sequence[Row]) -> str:
    """Markdown; what is off by more than is allowed says so."""
    return "\n".join([*_HEAD, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    case = row.case
    who = "plain"
    if case.method == "core":
        who = f"ours, lists of {case.listed}" if case.listed else "ours"
        who += f", tasks of {case.task}" if case.direction == "forward" and not case.listed else ""
        who += ", causal" if case.causal else ""
    heads = str(case.heads) if case.heads == case.kv_heads else f"{case.heads} on {case.kv_heads}"
    off = f"{100 * row.off:+.1f} %" + ("" if row.holds else " **too far**")
    sizes = (case.direction, case.length, heads, case.width, case.cache >> 10)
    numbers = (f"{row.counted / 1e6:.2f}", f"{row.predicted / 1e6:.2f}", off)
    return "| " + " | ".join(map(str, (who, *sizes, *numbers))) + " |"


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence."""
    parts = []
    for method, name in (("core", "ours"), ("plain", "plain")):
        of = [row for row in rows if row.case.method == method]
        if of:
            worst = max(of, key=lambda row: abs(row.off))
            parts.append(
                f"{name}: {len(of)} cases, off by {100 * abs(worst.off):.1f} % at the most "
                f"({100 * worst.case.allowed:.0f} % allowed)"
            )
    return "; ".join(parts)
