"""Attention over several processes beside one, by schedule and mask: scripts/bench_context.py.

Processes, each pinned to a core with one thread; two, or as many as ``--processes`` says. A round
computes forward and backward by the first process alone, then by all of them with each schedule.
The efficiency is the wall time of one over that of all times the cores that they have, paired
within rounds: 1.0 where splitting costs nothing. Processor time says the same of a busy machine,
and how much more the busiest process has than the mean, beside what ``forecast`` predicts. Medians
and quartiles; ``--json FILE`` keeps every sample.
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
    forecast,
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
    causal = masks.causal()
    return causal if name == "causal" else causal & masks.document(document_ids(length))


def ways(mask: Any, length: int, processes: int) -> dict[str, str | Layout]:
    """What is measured, by name."""
    balanced = balanced_layout(length, processes, mask=mask)
    return {each: each for each in ("ring", "zigzag", "gather", "ulysses")} | {"balanced": balanced}


def predicted(options: argparse.Namespace, mask: Any, schedule: Any) -> float:
    """The work of the busiest process over the mean, forward and backward."""
    dtype = getattr(torch, options.dtype)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes(options.length))
    call: dict[str, Any] = {"chip": options.chip, "link": "loopback", "mask": mask}
    found = forecast(q, k, v, mesh=options.processes, schedule=schedule, **call)
    seconds = [sum(each) for each in zip(*(one.computing for one in found.passes), strict=True)]
    return max(seconds) / statistics.mean(seconds)


def shapes(length: int) -> list[tuple[int, ...]]:
    """Of q, k and v."""
    return [(1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def timed(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Wall and processor seconds of a forward and a backward, until all are through."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    call().sum().backward()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu


def work(rank: int, options: argparse.Namespace, store: str, found: Any) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.processes
    )
    mesh = dist.group.WORLD
    assert mesh is not None
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes(options.length)]
    for name in options.masks:
        mask = mask_of(name, options.length)
        calls: dict[str, Callable[[], Tensor]] = {}
        leaves = [x.clone().requires_grad_() for x in whole]
        # The other processes have nothing to do for one: it waits.
        calls["one"] = lambda leaves=leaves, mask=mask: (
            tilewise.attention(*leaves, mask=mask) if rank == 0 else leaves[0][..., :1]
        )
        for way, schedule in ways(mask, options.length, options.processes).items():
            parts = [shard(x, mesh, 2, schedule).requires_grad_() for x in whole]
            calls[way] = lambda parts=parts, schedule=schedule, mask=mask: (
                context_parallel_attention(*parts, mesh=mesh, schedule=schedule, mask=mask)
            )
        for number in range(options.rounds + 1):
            for way, call in calls.items():
                wall, cpu = timed(call)
                each: list[Any] = [None] * options.processes
                dist.all_gather_object(each, cpu)
                if rank == 0 and number:  # the first round warms up
                    found.append((name, way, wall, sum(each), each))
    dist.destroy_process_group()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--chip", default="this", help="of the prediction: its ceilings")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--masks", nargs="+", default=["causal", "documents"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: got 1 or less; required: 2 or more, for quartiles")
    expected = {  # before anything is measured: the chip may lack a ceiling
        (name, way): predicted(options, mask, schedule)
        for name in options.masks
        for mask in (mask_of(name, options.length),)
        for way, schedule in ways(mask, options.length, options.processes).items()
    }
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        found = manager.list()
        mp.spawn(work, (options, f"{folder}/store", found), nprocs=options.processes)
        samples = list(found)
    record = {
        "chip": detect().name,
        "torch": torch.__version__,
        "length": options.length,
        "dtype": options.dtype,
        "heads": [HEADS, KV_HEADS, WIDTH],
        "processes": options.processes,
        "samples": samples,
    }
    head = "mask", "schedule", "ms", "efficiency", "by processor time", "busiest", "predicted"
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    cores = min(options.processes, len(os.sched_getaffinity(0)))
    for name in options.masks:
        by_way: dict[str, list[tuple[float, float]]] = {}
        busiest: dict[str, list[float]] = {}
        for mask, way, wall, cpu, each in samples:
            if mask == name:
                by_way.setdefault(way, []).append((wall, cpu))
                busiest.setdefault(way, []).append(max(each) / statistics.mean(each))
        one = by_way["one"]
        for way, own in by_way.items():
            middle = 1e3 * statistics.median(wall for wall, _ in own)
            shares = [
                [alone[at] / (more * all_[at]) for alone, all_ in zip(one, own, strict=True)]
                for at, more in enumerate((cores, 1))
            ]
            cells = [
                "{1:.2f} ({0:.2f} to {2:.2f})".format(*statistics.quantiles(each, n=4))
                for each in (*shares, busiest[way])
            ]
            if way == "one":
                cells = [""] * 4
            else:
                cells.append(f"{expected[name, way]:.2f}")
            print(f"| {name} | {way} | {middle:.0f} | {' | '.join(cells)} |")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
