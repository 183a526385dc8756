"""Blocks in which a pass compiles without a fault, the largest first: for the table of config.py.

``python -m tilelab.gate.search sm_90a dkdv 128`` tries them on the calls that need
most registers and prints what is wrong with each until one is good. ``--heavy`` calls are those of
``config.py``: more than a comparison or two per pair. Run it with every version of Triton that is
to be served, the next time from the first one's winner on (``--after``).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tilelab.cases.case import Case as Attention
from tilelab.cases.table import rows
from tilelab.gate.cases import backward, forward, kind_of
from tilelab.gate.record import TARGETS, Case, Target, faults, target_named
from tilewise.inspect.gpu import KERNELS, Family, Pass, shared_need
from tilewise.plan.tuned import Blocks

_FORWARD = ("forward", "decode")
_WIDTH = 128  # of the rows that stand for all widths
_ROWS = 16  # of a block of the pass "decode"
_SIDES = ((128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (32, 32), (32, 16), (16, 16))
_MOST = 240  # accumulators of a thread, in registers; AMD's wide warps have twice as many


def main(argv: Sequence[str] | None = None) -> int:
    """Search and print; 0 if there are such blocks, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tilelab.gate.search")
    parser.add_argument("target", choices=[each.name for each in TARGETS if not each.why_not])
    parser.add_argument("pass_name", choices=list(KERNELS), metavar="pass")
    parser.add_argument("width", type=int)
    parser.add_argument("--heavy", action="store_true")
    parser.add_argument("--single", action="store_true", help="float32")
    parser.add_argument("--after", default="", help="begin with these, e.g. 128x64/8/2")
    options = parser.parse_args(argv)
    target = target_named(options.target)
    dtype = torch.float32 if options.single else torch.bfloat16
    itemsize = dtype.itemsize
    rungs = list(ladder(target.family, options.pass_name, options.width, itemsize))
    if options.after:
        rungs = rungs[rungs.index(blocks_of(options.after)) :]
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    for blocks in rungs:
        wrong = _wrong(target, options.pass_name, _calls(options, dtype), blocks)
        print(blocks, wrong or "good", flush=True)
        if not wrong:
            return 0
    return 1


def ladder(family: Family, pass_name: Pass, width: int, itemsize: int) -> Iterator[Blocks]:
    """Blocks worth trying, the most pairs first, of these the most warps and stages.

    The longer side is of what a program owns: queries, and keys in the pass "dkdv". That of few
    queries, "decode", owns as few rows, and has the warps for no more. Left out is what cannot fit
    into shared memory, or whose accumulators alone fill the registers.
    """
    owner = 2 if pass_name == "dkdv" else 1
    few = pass_name == "decode"
    for long, short in ((_ROWS, keys) for keys in (128, 64, 32, 16)) if few else _SIDES:
        queries, keys = (short, long) if pass_name == "dkdv" else (long, short)
        for warps in (4,) if few else (8, 4):
            held = (owner * long * width + long * short) / (warps * family.warp)
            if held > _MOST * family.warp // 32:
                continue
            for stages in (3, 2, 1):
                blocks = Blocks(queries, keys, warps, stages)
                need = shared_need(pass_name, blocks, itemsize, width, width)
                if need <= family.shared_bytes:
                    yield blocks


def _calls(options: argparse.Namespace, dtype: torch.dtype) -> list[Attention]:
    """Return the gate's rows of these blocks, at the width and in the dtype."""
    kind = "decode" if options.pass_name == "decode" else "full"
    sizes = {"head_dim": options.width, "value_dim": options.width, "dtype": dtype}
    return [
        replace(row, **sizes)
        for row in rows("gate")
        if (row.kind, row.dtype, row.head_dim) == (kind, torch.bfloat16, _WIDTH)
        and (kind_of(row) != "plain") == options.heavy
        and (options.pass_name in _FORWARD or row.passes == "both")
    ]


def _wrong(target: Target, pass_name: Pass, calls: Sequence[Attention], blocks: Blocks) -> str:
    """Return what is wrong with blocks on the first call that they fail; empty if none."""
    from tilelab.gate.compiling import compile_launch

    make = forward if pass_name in _FORWARD else backward
    for each in calls:
        case = Case("search", lambda family: [], each.dtype.itemsize == 2)
        for launch in make(each, target.family.name, [(pass_name, blocks)]):
            kernel = launch.kernel.__name__
            if kernel == KERNELS[pass_name]:
                record = compile_launch("search", kernel, launch, target)
                if found := faults(record, case, target, None):
                    return f"{each.name}: {'; '.join(found)}"
    return ""


def blocks_of(text: str) -> Blocks:
    """Return blocks from their text, such as "128x64/8/2"."""
    return Blocks(*(int(number) for number in re.split("[x/]", text)))


if __name__ == "__main__":
    sys.exit(main())
