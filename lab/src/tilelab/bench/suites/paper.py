"""Suite ``paper``: the FlashAttention paper's figures of runtime and memory, on this machine.

Source: Dao, Fu, Ermon, Rudra and Re, "FlashAttention", NeurIPS 2022, section 4.3 (figure 3) and
appendix E.6: forward, backward and both, with and without dropout and a padding mask.
"""

from __future__ import annotations

from functools import partial

from tilelab.bench.suites.memory import weigh
from tilelab.bench.suites.steps import Settings, Step
from tilelab.bench.suites.timed import timed
from tilelab.peers.methods import exact, rivals
from tilelab.peers.work import Pass

SUITE = "paper"
_DROPOUT = 0.1
_PADDED = 8  # an eighth of the keys is padding
_EXTRAS = ((0.0, False), (_DROPOUT, True), (_DROPOUT, False), (0.0, True))
_PASSES: tuple[tuple[Pass, str], ...] = (
    ("both", "forward and backward"),
    ("forward", "forward"),
    ("backward", "backward"),
)


def steps(settings: Settings) -> list[Step]:
    """Times with and without dropout and padding along the length, and memory of both passes."""
    methods = [*exact(settings.device, with_flex=False), *rivals()]
    found = []
    for length in settings.lengths:
        for passes, words in _PASSES[:1] if settings.quick else _PASSES:
            for dropout_p, padded in _EXTRAS:
                if settings.quick and bool(dropout_p) != padded:
                    continue
                extras = ["dropout"] * bool(dropout_p) + ["padding"] * padded
                work = settings.work(
                    SUITE,
                    f"{words}, {' and '.join(extras)}" if extras else words,
                    length,
                    settings.dtypes[0],
                    passes=passes,
                    padding=length // _PADDED if padded else 0,
                    dropout_p=dropout_p,
                )
                found += timed([work], methods)
        case = "memory, forward and backward"
        both = settings.work(SUITE, case, length, settings.dtypes[0], passes="both")
        found.append(Step(f"memory, {length}", partial(weigh, [both], methods)))
    return found
