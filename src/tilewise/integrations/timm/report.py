"""Record what a model of timm did since it was switched."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from tilewise.compat.sdpa_take import Report as Calls
from tilewise.torch_private import constant_while_compiling

_NUMBERS = count()
_ALL: WeakValueDictionary[int, Report] = WeakValueDictionary()


class Report(Calls):
    """Counts of the calls that tilewise took or left to torch, why, and of which layers.

    Args:
        taken: how many calls tilewise computed.
        left: how many calls torch computed, by the reason why tilewise did not.
        layers: how many layers were switched, by their class.
        passed_over: how many compute attention weights themselves and stay as they are, by class.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: Counter[str] = Counter()
        self.passed_over: Counter[str] = Counter()
        self.number = next(_NUMBERS)
        _ALL[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        """Itself: the calls of a copied model count where those of the model do."""
        return self

    def __reduce__(self) -> tuple[type[Report], tuple[()], dict[str, Any]]:
        """Pickle the layers, and no calls yet."""
        return Report, (), {"layers": self.layers, "passed_over": self.passed_over}

    def __str__(self) -> str:
        lines = [super().__str__(), f"  layers: {_listed(self.layers) or 'none'}"]
        if self.passed_over:
            lines.append(f"  compute weights themselves: {_listed(self.passed_over)}")
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {number}" for name, number in counts.items())


@constant_while_compiling
def note_traced(number: int, reason: str | None) -> bool:
    """Count, while torch.compile traces, and be nothing of the graph: a report by its number."""
    report = _ALL.get(number)
    if report is not None:
        report.note(reason)
    return True
