"""The long-context table: one forward and backward of a long window, per attention and length.

Plain attention writes an N x N matrix per head and layer, so it is run only where an estimate says
that it fits; else the table says what it would have needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewise.lab.demo.child import Child, ChildError
from tilewise.lab.demo.corpus import bytes_needed
from tilewise.lab.demo.settings import Settings
from tilewise.lab.demo.worker import Job
from tilewise.lab.memory import available_bytes
from tilewise.nn import Implementation

# tilewise comes first: the estimate for plain starts from its memory. sdpa, torch's own fused
# attention, is there so that nobody takes plain for the best that torch can do.
IMPLEMENTATIONS: tuple[Implementation, ...] = ("tilewise", "sdpa", "plain")
STEP_LIMIT_S = 90.0
REPEAT_BELOW_S = 2.0
_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Cell:
    """One step of one length with one attention.

    Args:
        context: bytes in the window.
        implementation: the attention.
        wall_s, cpu_s: medians of one forward and backward; None where it was not run.
        peak_bytes: most memory of the process over what it held before the model was built.
        saved_bytes: what autograd kept of the forward pass for the backward pass.
        estimate_bytes: of ``peak_bytes``, made before the step; None for fused attention.
        loss: nats per byte, of the untrained model on the same window.
        reason: why it was not run; empty where it was.
    """

    context: int
    implementation: Implementation
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    estimate_bytes: int | None = None
    loss: float | None = None
    reason: str = ""


def fill(
    settings: Settings,
    corpus_bytes: int,
    corpus: str,
    cells: list[Cell],
    watch: Callable[[Cell], None],
) -> None:
    """Measure every cell that can be, appending to ``cells`` at once (so a stop keeps the rest).

    Args:
        settings: of the run.
        corpus_bytes: size of the text; contexts that it is too short for are left out.
        corpus: path of the text.
        cells: where the results go.
        watch: is told of each.
    """
    for context in settings.long_contexts:
        if bytes_needed(context) > corpus_bytes:
            continue
        for implementation in IMPLEMENTATIONS:
            cell = _cell(settings, corpus, cells, context, implementation)
            cells.append(cell)
            watch(cell)


def plain_estimate_bytes(settings: Settings, context: int, fused_peak_bytes: int) -> int:
    """The peak of a plain step, from the peak of a fused one.

    Every layer keeps its probabilities (float32 [heads, N, N]) and mask (bool [N, N]) for the
    backward pass, which at its start holds two more such matrices, the gradients of the
    probabilities and of the scores. All else is what the fused step uses too.
    """
    matrix = settings.heads * context * context * 4
    return fused_peak_bytes + (settings.layers + 2) * matrix + settings.layers * context * context


def _cell(
    settings: Settings,
    corpus: str,
    cells: list[Cell],
    context: int,
    implementation: Implementation,
) -> Cell:
    cell = Cell(context, implementation)
    if implementation == "plain":
        cell = replace(cell, estimate_bytes=_estimate(settings, cells, context))
    expected_s = _expected_s(cells, context, implementation)
    reason = _why_not(cell, expected_s)
    if reason:
        return replace(cell, reason=reason)
    job = Job(replace(settings, context=context).as_json(), corpus, implementation, None)
    repeats = 3 if expected_s is not None and expected_s < REPEAT_BELOW_S else 1
    try:
        with Child(job, f"{implementation} at {context:,}") as child:
            child.hear()
            reply = child.ask(do="long_step", repeats=repeats)
    except ChildError as error:
        return replace(cell, reason=f"failed: {error}")
    return replace(
        cell,
        wall_s=statistics.median(reply["wall_s"]),
        cpu_s=statistics.median(reply["cpu_s"]),
        peak_bytes=reply["peak_bytes"],
        saved_bytes=reply["saved_bytes"],
        loss=reply["loss"],
    )


def _estimate(settings: Settings, cells: list[Cell], context: int) -> int:
    """From the fused peak at this length, or without one from nothing else (then too low)."""
    peaks = [c.peak_bytes for c in cells if c.context == context and c.peak_bytes is not None]
    return plain_estimate_bytes(settings, context, min(peaks, default=0))


def _expected_s(cells: list[Cell], context: int, implementation: Implementation) -> float | None:
    """From the longest window measured so far, as if all time were quadratic in the length."""
    done = [
        (cell.context, cell.wall_s)
        for cell in cells
        if cell.implementation == implementation and cell.wall_s is not None
    ]
    if not done:
        return None
    length, seconds = done[-1]
    return seconds * (context / length) ** 2


def _why_not(cell: Cell, expected_s: float | None) -> str:
    """Memory first: more time would not help there."""
    free = available_bytes()
    needs = cell.estimate_bytes
    if needs is not None and free is not None and needs > _MEMORY_SHARE * free:
        return f"needs {needs / 1e9:,.1f} GB, {free / 1e9:,.1f} GB free, not run"
    if expected_s is not None and expected_s > STEP_LIMIT_S:
        return f"would take about {expected_s:,.0f} s, not run"
    return ""
