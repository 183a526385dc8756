"""Split a score into stages: steps that the language can read, and raw steps, which it cannot.

A stage maps the running score s of a block of pairs. It has the functions of a ``Variant``: the
score, its derivative with respect to s, and for each load the derivative and the element. The
functions here are those of several stages one after another. The input of a stage is recomputed
from everything before it; the compiler finds what it has already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilewise.variants.program import RAW, Instr, Program

_REST = "b, h, m, n, M, N, tensors, shapes"


class Text(NamedTuple):
    """A function that is still text.

    Args:
        lines: of its body; ``result`` is what it gives.
        uses: the functions that it calls, by the names that it calls them.
    """

    lines: tuple[str, ...]
    uses: tuple[tuple[str, Any], ...]


def stages_of(program: Program) -> list[Program]:
    """Runs of steps that are one expression, and the raw steps between them."""
    stages: list[Program] = []
    for instr in program:
        if instr.op == RAW or not stages or stages[-1][-1].op == RAW:
            stages.append((instr,))
        else:
            stages[-1] += (instr,)
    return stages


def raw_text(instr: Instr, ranks: Sequence[int], name: str, function: Any) -> Text:
    """Write one of a raw step's functions, with the step's own tensors, for a block of any shape.

    Args:
        instr: the step.
        ranks: dimensions of all tensors of the score, by slot.
        name: what the text calls the function.
        function: a ``triton.jit`` function.
    """
    tensors = [f"tensors[{slot}]" for slot in instr.slots]
    numbers: list[str] = []
    for slot in instr.slots:
        start = 2 * sum(ranks[:slot])
        numbers += [f"shapes[{start + at}]" for at in range(2 * ranks[slot])]
    call = f"{name}(s, b, h, m, n, M, N, {_tuple(tensors)}, {_tuple(numbers)})"
    whole = f"tl.broadcast_to(tl.cast({call}, tl.float32), (m + n).shape)"
    return Text((f"result = {whole}",), ((name, function),))


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)},)" if parts else "()"


class Chain:
    """The functions of several stages, each a ``Variant``, one after another."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self.stages = stages

    def score(self) -> Text:
        """Return the score after the last stage."""
        written = _Writer(self.stages)
        last = len(self.stages)
        written.enter(last)
        return written.result(f"s{last}")

    def gain(self) -> Text:
        """Return the derivative with respect to the score before the first stage."""
        written = _Writer(self.stages)
        return written.result(*written.slopes(0))

    def loads(self) -> list[Text]:
        """Return the derivatives with respect to the loads of all stages, in order."""
        found = []
        for place, stage in enumerate(self.stages):
            for load in stage.loads:
                written = _Writer(self.stages)
                later = written.slopes(place + 1)
                found.append(written.result(written.call(load, place), *later))
        return found

    def load_indices(self) -> list[Text]:
        """Return the elements of the loads of all stages, in order."""
        found = []
        for place, stage in enumerate(self.stages):
            for index in stage.load_indices:
                written = _Writer(self.stages)
                written.enter(place)
                found.append(written.result(written.call(index, place)))
        return found


class _Writer:
    """Text that calls the functions of stages."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self.stages = stages
        self.lines = ["s0 = s"]
        self.uses: dict[str, Any] = {}

    def call(self, function: Any, place: int) -> str:
        """Return a call of a function of the stage at a place, of what enters it."""
        name = function.__name__
        self.uses[name] = function
        return f"{name}(s{place}, {_REST})"

    def enter(self, place: int) -> None:
        """Compute what enters a stage, and all before it: ``s0`` and so on."""
        for at, stage in enumerate(self.stages[:place]):
            self.lines.append(f"s{at + 1} = {self.call(stage.score, at)}")

    def slopes(self, first: int) -> list[str]:
        """Return the derivatives of the stages from one on, where they are not 1."""
        self.enter(len(self.stages) - 1)
        later = list(enumerate(self.stages))[first:]
        return [self.call(stage.gain, place) for place, stage in later if stage.gain is not None]

    def result(self, *factors: str) -> Text:
        """Return the text of a function that gives a product."""
        lines = (*self.lines, f"result = {' * '.join(factors)}")
        return Text(lines, tuple(self.uses.items()))
