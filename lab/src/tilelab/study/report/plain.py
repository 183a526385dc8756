"""The memory that plain attention would have needed, where an experiment has to leave it out."""

from __future__ import annotations

from tilelab.study.ask import config
from tilelab.study.need import Need, need
from tilelab.study.report.view import Cell, Table
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import ArmMeasures, ExperimentVerdict

__all__ = ["plain_table"]

_NONE = Cell("\N{EN DASH}", tone="soft")
_PATH = "attention.implementation"


def plain_table(
    planned: config.Experiment, verdict: ExperimentVerdict, memory_bytes: int | None
) -> Table | None:
    """Return a step of the arms beside what plain attention would need for it.

    Args:
        planned: the experiment.
        verdict: of it.
        memory_bytes: of the machine; None where it is not known.

    Returns:
        None unless the arms compare kernels and none of them is plain.
    """
    if not any(_PATH in arm.changes for arm in planned.arms):
        return None
    ran = [planned.config_of(arm).attention.implementation for arm in planned.arm_names]
    if "plain" in ran:
        return None
    wanted = need(config.change(planned.baseline, {_PATH: "plain"}))
    rows = [
        (
            Cell("plain", "not run"),
            _NONE,
            Cell(words.size(wanted.total - wanted.process), "estimated", "bad"),
        ),
        _row(verdict.baseline.name, verdict.baseline.measures, withheld=False),
        *(_row(arm.arm, arm.measures, bool(arm.speed_withheld)) for arm in verdict.arms),
    ]
    title = f"One step at context {planned.baseline.model.context:,}"
    head = ("attention", "step", "peak memory")
    return Table(
        title, head, tuple(rows), (_note(planned.baseline, wanted, memory_bytes),), "plain"
    )


def _row(arm: str, measures: ArmMeasures, withheld: bool) -> tuple[Cell, ...]:
    step, memory = measures["step_s"], measures.memory
    time = _NONE if step is None else Cell(words.duration(step.mean))
    return (
        Cell(arm),
        Cell("withheld", tone="soft") if withheld else time,
        _NONE if memory is None else Cell(words.size(memory.peak_bytes)),
    )


def _note(run: config.RunConfig, wanted: Need, memory_bytes: int | None) -> str:
    model, batch = run.model, run.training.batch
    context = f"{model.context:,}"
    has = "" if memory_bytes is None else f" This machine has {words.size(memory_bytes)}."
    return (
        "Plain attention keeps its probabilities for the backward pass: "
        f"{model.layers} layers \N{MULTIPLICATION SIGN} {batch * model.heads} heads "
        f"\N{MULTIPLICATION SIGN} {context} \N{MULTIPLICATION SIGN} {context} numbers, with what "
        f"one layer holds for a moment {words.size(wanted.matrix)}.{has}"
    )
