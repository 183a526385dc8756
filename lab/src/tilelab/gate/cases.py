"""The cases: what the passes launch for the calls that matter, in the tiles that ship.

Importing this module imports no Triton; making a case's launches does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tilelab.gate.calls import Call, backward_tensors, operands_of
from tilelab.gate.record import Case
from tilewise.inspect import gpu
from tilewise.inspect.gpu import FAMILIES, Launch, Overrides, holds
from tilewise.variants.float8 import FLOAT8

__all__ = ["CASES", "backward", "captured", "forward"]


def forward(call: Call, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the launches of the forward pass on a family of chips.

    Args:
        call: the call; few queries are decoded.
        family: a name of ``gpu.FAMILIES``.
        overrides: blocks in the place of the family's own.
    """
    problem, operands = operands_of(call)
    result = gpu.empty_result(problem, operands.q, call.statistics)
    return gpu.forward_launches(problem, operands, result, family, overrides)


def backward(call: Call, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the backward pass's launches, with every gradient; arguments as for ``forward``."""
    problem, operands = operands_of(call)
    result = gpu.empty_result(problem, operands.q, call.statistics)
    grad_out, needs, grads = backward_tensors(problem, operands)
    sent = grad_out, None
    return gpu.backward_launches(problem, operands, result, sent, needs, grads, family, overrides)


def captured(call: Call, family: str) -> Sequence[Launch]:
    """Return the launches of ``backward`` that make gradients of what the score captured."""
    launches = backward(call, family)
    names = [launch.kernel.__name__ for launch in launches]
    return launches[names.index("query_kernel") + 1 :]


_HALF, _SINGLE = torch.float16, torch.float32
_FLOAT8 = {
    "D64 full fp8": Call(64, FLOAT8),
    "D64 causal fp8": Call(64, FLOAT8, mask="causal"),
    "D128 full fp8": Call(128, FLOAT8),
    "D128 causal fp8": Call(128, FLOAT8, mask="causal"),
    "D256 full fp8": Call(256, FLOAT8),
    "D256 causal fp8": Call(256, FLOAT8, mask="causal"),
}
_KEY = ("D128 causal", "D64 causal", "D128 alibi softcap causal")
# Every row of the table of blocks at every width: plain, heavy and scattered, 16 bits and float32.
_CALLS = {
    "D64 full": Call(64),
    "D64 causal": Call(64, mask="causal"),
    "D128 full": Call(128),
    "D128 causal": Call(128, mask="causal"),
    "D256 full": Call(256),
    "D256 causal": Call(256, mask="causal"),
    "D512 causal": Call(512, mask="causal"),
    "D64 causal fp16": Call(64, _HALF, mask="causal"),
    "D128 causal fp16": Call(128, _HALF, mask="causal"),
    "D64 causal fp32": Call(64, _SINGLE, mask="causal"),
    "D128 causal fp32": Call(128, _SINGLE, mask="causal"),
    "D256 causal fp32": Call(256, _SINGLE, mask="causal"),
    "D512 causal fp32": Call(512, _SINGLE, mask="causal"),
    "D64 alibi softcap causal fp32": Call(64, _SINGLE, "causal", "alibi softcap"),
    "D128 alibi softcap causal fp32": Call(128, _SINGLE, "causal", "alibi softcap"),
    "D80 causal": Call(80, mask="causal"),
    "D128 window": Call(128, mask="window"),
    "D64 document": Call(64, mask="document"),
    "D128 document": Call(128, mask="document"),
    "D256 document": Call(256, mask="document"),
    "D128 table": Call(128, mask="table"),
    "D128 alibi softcap causal": Call(128, mask="causal", score="alibi softcap"),
    "D256 alibi softcap causal": Call(256, mask="causal", score="alibi softcap"),
    "D512 alibi softcap causal": Call(512, mask="causal", score="alibi softcap"),
    "D64 bias": Call(64, score="bias"),
    "D128 bias": Call(128, score="bias"),
    "D128 raw causal": Call(128, mask="causal", score="raw"),
    "D64 head bias": Call(64, score="head bias"),
    "D128 head bias": Call(128, score="head bias"),
    "D64 head bias fp32": Call(64, _SINGLE, score="head bias"),
    "D128 dropout causal": Call(128, mask="causal", dropout_p=0.1),
    "D128 varlen causal": Call(128, mask="causal", varlen=True),
    "D64 sinks statistics": Call(64, mask="causal", sinks=True, statistics="top1"),
    "D128 sinks statistics": Call(128, mask="causal", sinks=True, statistics="top1"),
}
_DECODED = {
    "D64 causal": Call(64, mask="causal", queries=1),
    "D128 causal": Call(128, mask="causal", queries=1),
    "D256 causal": Call(256, mask="causal", queries=1),
    "D128 causal fp32": Call(128, _SINGLE, mask="causal", queries=1),
    "D128 document": Call(128, mask="document", queries=4),
    "D128 alibi softcap causal": Call(128, mask="causal", score="alibi softcap", queries=4),
    "D128 sinks statistics": Call(128, sinks=True, statistics="top1", queries=1),
    "D128 causal fp8": Call(128, FLOAT8, mask="causal", queries=1),
    "D128 causal pages of 16": Call(128, mask="causal", queries=1, page_size=16),
    "D128 causal pages of 128": Call(128, mask="causal", queries=1, page_size=128),
}
_PAGED = {
    "D128 causal pages of 16": Call(128, mask="causal", page_size=16),
    "D128 causal pages of 128": Call(128, mask="causal", page_size=128),
    "D128 causal pages of 16 fp8": Call(128, FLOAT8, mask="causal", page_size=16),
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
_TRANSPOSING = frozenset({"transpose_kernel"})


def _cases() -> list[Case]:
    found = [
        Case(f"forward {name}", partial(forward, call), without_products=_TRANSPOSING)
        for name, call in _FLOAT8.items()
    ]
    for name, call in _CALLS.items():
        sixteen, key = call.dtype.itemsize == 2, name in _KEY
        where = _families(call)
        launches = partial(forward, call)
        found.append(
            Case(f"forward {name}", launches, sixteen, key=key, families=where, described=key)
        )
        if not call.statistics:
            launches = partial(backward, call)
            found.append(Case(f"backward {name}", launches, sixteen, _PLAIN, key, where))
    for width in (64, 128, 256):
        call = Call(width, mask="causal", score="learned")
        launches = partial(captured, call)
        found.append(Case(f"captured D{width} causal", launches, without_products=_PLAIN))
        launches = partial(captured, call._replace(score="few"))
        found.append(Case(f"captured D{width} few causal", launches, without_products=_PLAIN))
    for name, call in _DECODED.items():
        sixteen, key = call.dtype.itemsize <= 2, name == _KEY[0]
        found.append(Case(f"decode {name}", partial(forward, call), sixteen, _PLAIN, key))
    found += [Case(f"forward {name}", partial(forward, call)) for name, call in _PAGED.items()]
    return found


def _families(call: Call) -> tuple[str, ...]:
    """Return the families that the backend does not decline such widths on."""
    return tuple(name for name in FAMILIES if holds(name, call.dtype, call.width, call.width))


CASES = _cases()
