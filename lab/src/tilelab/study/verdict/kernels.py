"""The kernel guard: did an arm run other attention kernels than the baseline, and did it ask to?

An arm that switches the attention kernel as a side effect (attention dropout does that to
``scaled_dot_product_attention`` on a CPU) measures two changes at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilelab.study.ask.config import Experiment
from tilelab.study.records.events import PROBED, RunRecord
from tilelab.study.verdict.result import KernelFlag, KernelUse
from tilelab.study.verdict.text import layers_text

__all__ = ["kernel_flags", "kernel_uses"]

Names = frozenset[str]


def kernel_uses(records: Iterable[RunRecord]) -> tuple[KernelUse, ...]:
    """Return the attention kernels of these runs, most calls first."""
    layers: dict[str, set[int]] = {}
    calls: dict[str, int] = {}
    for record in records:
        for each in record.kernels.layers if record.kernels is not None else ():
            layers.setdefault(each.kernel, set()).add(each.layer)
            calls[each.kernel] = calls.get(each.kernel, 0) + each.calls
    order = sorted(calls, key=lambda kernel: (-calls[kernel], kernel))
    return tuple(KernelUse(name, tuple(sorted(layers[name])), calls[name]) for name in order)


def kernel_flags(
    experiment: Experiment, arm: str, ran: Sequence[KernelUse], baseline: Sequence[KernelUse]
) -> tuple[KernelFlag, ...]:
    """Return flags where layers of an arm ran other kernels than those of the baseline.

    Args:
        experiment: of the arm; it tells what the arm asked for.
        arm: its name.
        ran: what ran in the arm.
        baseline: what ran in the baseline. Nothing is flagged while either is empty.

    Returns:
        One flag for each pair of kernels that differ, in the order of the layers.
    """
    if not ran or not baseline:
        return ()
    mine, theirs = _by_layer(ran), _by_layer(baseline)
    every = frozenset(map(_kernel, baseline))
    differing: dict[tuple[Names, Names], list[int]] = {}
    for layer, names in sorted(mine.items()):
        other = theirs.get(layer, every)  # an arm with more layers has no counterpart for some
        if names != other:
            differing.setdefault((names, other), []).append(layer)
    expected = _asked(experiment, arm)
    return tuple(
        _flag(names, other, tuple(layers), len(mine), expected)
        for (names, other), layers in differing.items()
    )


def _asked(experiment: Experiment, arm: str) -> bool:
    """Return whether the arm says by itself that another attention runs."""
    kind = next(each.kind for each in experiment.arms if each.name == arm)
    wanted = experiment.config_of(arm).attention.implementation
    return kind == "systems" or wanted != experiment.baseline.attention.implementation


def _flag(
    names: Names, other: Names, layers: tuple[int, ...], count: int, expected: bool
) -> KernelFlag:
    mine, theirs = " and ".join(sorted(names)), " and ".join(sorted(other))
    where = layers_text(layers, count)
    if expected:
        words = f"{where} ran {mine}, where the baseline ran {theirs}, as the arm asks."
    else:
        words = (
            f"{where} ran {mine}, where the baseline ran {theirs}. The arm did not ask for that: "
            "its speed and memory are those of both changes together."
        )
    return KernelFlag(mine, theirs, layers, expected, words)


def _by_layer(uses: Sequence[KernelUse]) -> dict[int, Names]:
    layers = {layer for use in uses for layer in use.layers}
    return {
        layer: frozenset(_kernel(use) for use in uses if layer in use.layers) for layer in layers
    }


def _kernel(use: KernelUse) -> str:
    """Return the kernel, however it became known: compiling a model is no other attention."""
    return use.kernel.removesuffix(PROBED)
