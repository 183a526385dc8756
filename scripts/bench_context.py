"""Attention over two processes beside one, by schedule and mask: scripts/bench_context.py.

Two processes, each pinned to a core with one thread. A round computes forward and backward by the
first process alone, then by both of them with each schedule. The efficiency is the wall time of one
over twice that of two, paired within rounds: 1.0 where splitting costs nothing. Processor time
says the same of a busy machine. Medians and quartiles; ``--json FILE`` keeps every sample.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.chips import detect
from tilewise.distributed import (
    Layout,
    balanced_layout,
    context_parallel_attention,
    shard,
)

HEADS, KV_HEADS, WIDTH = 8, 2, 64
DOCUMENTS = (0.05, 0.45, 0.1, 0.4)  # shares of the sequence


def document_ids(length: int) -> Tensor:
    """[1, S], documents of uneven lengths."""
    counts = [int(share * length) for share in DOCUMENTS[:-1]]
    counts.append(length - sum(counts))
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[None]


def mask_of(name: str, length: int) -> Any:
    """A causal mask, alone or within documents."""
    return (
        masks.causal()
        if name == "causal"
        else masks.causal() & masks.document(document_ids(length))
    )


def ways(mask: Any, length: int) -> dict[str, str | Layout]:
    """What is measured, by name."""
    balanced = balanced_layout(length, 2, mask=mask)
    return {each: each for each in ("ring", "zigzag", "gather", "ulysses")} | {"balanced": balanced}


def timed(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Wall and processor seconds of a forward and a backward, until all are through."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    call().sum().backward()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu


def work(rank: int, options: argparse.Namespace, store: str, found: Any) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.group.WORLD
    assert mesh is not None
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, options.length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for name in options.masks:
        mask = mask_of(name, options.length)
        calls: dict[str, Callable[[], Tensor]] = {}
        leaves = [x.clone().requires_grad_() for x in whole]
        # The second process has nothing to do for one: it waits.
        calls["one"] = lambda leaves=leaves, mask=mask: (
            tilewise.attention(*leaves, mask=mask) if rank == 0 else leaves[0][..., :1]
        )
        for way, schedule in ways(mask, options.length).items():
            parts = [shard(x, mesh, 2, schedule).requires_grad_() for x in whole]
            calls[way] = lambda parts=parts, schedule=schedule, mask=mask: (
                context_parallel_attention(*parts, mesh=mesh, schedule=schedule, mask=mask)
            )
        for number in range(options.rounds + 1):
            for way, call in calls.items():
                wall, cpu = timed(call)
                total = torch.tensor(cpu, dtype=torch.float64)
                dist.all_reduce(total)
                if rank == 0 and number:  # the first round warms up
                    found.append((name, way, wall, total.item()))
    dist.destroy_process_group()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--masks", nargs="+", default=["causal", "documents"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: got 1 or less; required: 2 or more, for quartiles")
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        found = manager.list()
        mp.spawn(work, (options, f"{folder}/store", found), nprocs=2)
        samples = list(found)
    record = {
        "chip": detect().name,
        "torch": torch.__version__,
        "length": options.length,
        "dtype": options.dtype,
        "heads": [HEADS, KV_HEADS, WIDTH],
        "samples": samples,
    }
    print("| mask | schedule | ms | efficiency by wall time | by processor time |")
    print("|---|---|---|---|---|")
    for name in options.masks:
        by_way: dict[str, list[tuple[float, float]]] = {}
        for mask, way, wall, cpu in samples:
            if mask == name:
                by_way.setdefault(way, []).append((wall, cpu))
        one = by_way["one"]
        for way, own in by_way.items():
            middle = 1e3 * statistics.median(wall for wall, _ in own)
            shares = [
                [alone[at] / ((2 - at) * both[at]) for alone, both in zip(one, own, strict=True)]
                for at in (0, 1)
            ]
            cells = [
                "{1:.2f} ({0:.2f} to {2:.2f})".format(*statistics.quantiles(each, n=4))
                for each in shares
            ]
            if way == "one":
                cells = ["", ""]
            print(f"| {name} | {way} | {middle:.0f} | {cells[0]} | {cells[1]} |")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
