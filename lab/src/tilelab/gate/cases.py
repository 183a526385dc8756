"""The cases: what the passes launch for the calls that matter, in the tiles that ship.

Importing this module imports no Triton; making a case's launches does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tilelab.gate.calls import Asked, backward_tensors, operands_of
from tilelab.gate.case import Case
from tilewise.inspect import gpu
from tilewise.inspect.gpu import FAMILIES, Launch, Overrides, holds
from tilewise.variants.float8 import FLOAT8

__all__ = ["CASES", "backward", "captured", "forward"]


def forward(asked: Asked, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the launches of the forward pass on a family of chips.

    Args:
        asked: the call; few queries are decoded.
        family: a name of ``gpu.FAMILIES``.
        overrides: blocks in the place of the family's own.
    """
    problem, operands = operands_of(asked)
    result = gpu.empty_result(problem, operands.q, asked.statistics)
    return gpu.forward_launches(problem, operands, result, family, overrides)


def backward(asked: Asked, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the backward pass's launches, with every gradient; arguments as for ``forward``."""
    problem, operands = operands_of(asked)
    result = gpu.empty_result(problem, operands.q, asked.statistics)
    grad_out, needs, grads = backward_tensors(problem, operands)
    sent = grad_out, None
    return gpu.backward_launches(problem, operands, result, sent, needs, grads, family, overrides)


def captured(asked: Asked, family: str) -> Sequence[Launch]:
    """Return the launches of ``backward`` that make gradients of what the score captured."""
    launches = backward(asked, family)
    names = [launch.kernel.__name__ for launch in launches]
    return launches[names.index("query_kernel") + 1 :]


_HALF, _SINGLE = torch.float16, torch.float32
_EIGHTS = {
    "D64 full fp8": Asked(64, FLOAT8),
    "D64 causal fp8": Asked(64, FLOAT8, mask="causal"),
    "D128 full fp8": Asked(128, FLOAT8),
    "D128 causal fp8": Asked(128, FLOAT8, mask="causal"),
    "D256 full fp8": Asked(256, FLOAT8),
    "D256 causal fp8": Asked(256, FLOAT8, mask="causal"),
}
_KEY = ("D128 causal", "D64 causal", "D128 alibi softcap causal")
# Every row of the table of blocks at every width: plain, heavy and scattered, 16 bits and float32.
_CALLS = {
    "D64 full": Asked(64),
    "D64 causal": Asked(64, mask="causal"),
    "D128 full": Asked(128),
    "D128 causal": Asked(128, mask="causal"),
    "D256 full": Asked(256),
    "D256 causal": Asked(256, mask="causal"),
    "D512 causal": Asked(512, mask="causal"),
    "D64 causal fp16": Asked(64, _HALF, mask="causal"),
    "D128 causal fp16": Asked(128, _HALF, mask="causal"),
    "D64 causal fp32": Asked(64, _SINGLE, mask="causal"),
    "D128 causal fp32": Asked(128, _SINGLE, mask="causal"),
    "D256 causal fp32": Asked(256, _SINGLE, mask="causal"),
    "D512 causal fp32": Asked(512, _SINGLE, mask="causal"),
    "D64 alibi softcap causal fp32": Asked(64, _SINGLE, "causal", "alibi softcap"),
    "D128 alibi softcap causal fp32": Asked(128, _SINGLE, "causal", "alibi softcap"),
    "D80 causal": Asked(80, mask="causal"),
    "D128 window": Asked(128, mask="window"),
    "D64 document": Asked(64, mask="document"),
    "D128 document": Asked(128, mask="document"),
    "D256 document": Asked(256, mask="document"),
    "D128 table": Asked(128, mask="table"),
    "D128 alibi softcap causal": Asked(128, mask="causal", score="alibi softcap"),
    "D256 alibi softcap causal": Asked(256, mask="causal", score="alibi softcap"),
    "D512 alibi softcap causal": Asked(512, mask="causal", score="alibi softcap"),
    "D64 bias": Asked(64, score="bias"),
    "D128 bias": Asked(128, score="bias"),
    "D128 raw causal": Asked(128, mask="causal", score="raw"),
    "D64 head bias": Asked(64, score="head bias"),
    "D128 head bias": Asked(128, score="head bias"),
    "D64 head bias fp32": Asked(64, _SINGLE, score="head bias"),
    "D128 dropout causal": Asked(128, mask="causal", dropout_p=0.1),
    "D128 varlen causal": Asked(128, mask="causal", varlen=True),
    "D64 sinks statistics": Asked(64, mask="causal", sinks=True, statistics="top1"),
    "D128 sinks statistics": Asked(128, mask="causal", sinks=True, statistics="top1"),
}
_DECODED = {
    "D64 causal": Asked(64, mask="causal", queries=1),
    "D128 causal": Asked(128, mask="causal", queries=1),
    "D256 causal": Asked(256, mask="causal", queries=1),
    "D128 causal fp32": Asked(128, _SINGLE, mask="causal", queries=1),
    "D128 document": Asked(128, mask="document", queries=4),
    "D128 alibi softcap causal": Asked(128, mask="causal", score="alibi softcap", queries=4),
    "D128 sinks statistics": Asked(128, sinks=True, statistics="top1", queries=1),
    "D128 causal fp8": Asked(128, FLOAT8, mask="causal", queries=1),
    "D128 causal pages of 16": Asked(128, mask="causal", queries=1, page_size=16),
    "D128 causal pages of 128": Asked(128, mask="causal", queries=1, page_size=128),
}
_PAGED = {
    "D128 causal pages of 16": Asked(128, mask="causal", page_size=16),
    "D128 causal pages of 128": Asked(128, mask="causal", page_size=128),
    "D128 causal pages of 16 fp8": Asked(128, FLOAT8, mask="causal", page_size=16),
}
# Kernels that multiply no matrices: they read rows once, or sums that others made.
_PLAIN = frozenset(
    {
        "row_kernel",
        "sink_kernel",
        "fold_kernel",
        "fold_table_kernel",
        "merge_splits",
        "spread_lines_kernel",
        "factor_kernel",
        "number_kernel",
    }
)
_TURNS = frozenset({"turn_kernel"})


def _cases() -> list[Case]:
    found = [
        Case(f"forward {name}", partial(forward, asked), without_products=_TURNS)
        for name, asked in _EIGHTS.items()
    ]
    for name, asked in _CALLS.items():
        sixteen, key = asked.dtype.itemsize == 2, name in _KEY
        where = _families(asked)
        launches = partial(forward, asked)
        found.append(
            Case(f"forward {name}", launches, sixteen, key=key, families=where, described=key)
        )
        if not asked.statistics:
            launches = partial(backward, asked)
            found.append(Case(f"backward {name}", launches, sixteen, _PLAIN, key, where))
    for width in (64, 128, 256):
        asked = Asked(width, mask="causal", score="learned")
        launches = partial(captured, asked)
        found.append(Case(f"captured D{width} causal", launches, without_products=_PLAIN))
        launches = partial(captured, asked._replace(score="few"))
        found.append(Case(f"captured D{width} few causal", launches, without_products=_PLAIN))
    for name, asked in _DECODED.items():
        sixteen, key = asked.dtype.itemsize <= 2, name == _KEY[0]
        found.append(Case(f"decode {name}", partial(forward, asked), sixteen, _PLAIN, key))
    found += [Case(f"forward {name}", partial(forward, asked)) for name, asked in _PAGED.items()]
    return found


def _families(asked: Asked) -> tuple[str, ...]:
    """Return the families that the backend does not decline such widths on."""
    return tuple(name for name in FAMILIES if holds(name, asked.dtype, asked.width, asked.width))


CASES = _cases()
