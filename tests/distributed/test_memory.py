"""A process holds a share of a long sequence: its memory falls with the number of processes.

Protects the promise of O(S / P) memory: keys come in turn, and nobody has all of them unless the
schedule says so.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.distributed.calls import WAYS, Way
from tests.distributed.ranks import Ranks
from tests.peak import Peak, only_linux
from tilewise import masks
from tilewise.distributed import context_parallel_attention

LENGTH, HEADS, WIDTH = 12288, 2, 128


def peak(group: dist.ProcessGroup, way: Way) -> float:
    """MiB that a forward and a backward take beyond the rows of q, k and v."""
    rows = LENGTH // dist.get_world_size(group)
    q, k, v = (torch.full((1, HEADS, rows, WIDTH), 0.1, requires_grad=True) for _ in range(3))
    # All keys are needed somewhere, and few pairs are computed.
    mask = masks.causal() & masks.function(lambda b, h, m, n: (n % 1024 < 32) | (m - n < 32))
    context_parallel_attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], mesh=group).sum().backward()
    dist.barrier(group)
    taken = Peak()
    out = context_parallel_attention(
        q, k, v, mesh=way.mesh(group), schedule=way.schedule, mask=mask
    )
    out.sum().backward()
    return taken.mib()


@only_linux
def test_memory_falls_with_the_number_of_processes(ranks: Ranks) -> None:
    ring = {count: max(ranks.run(peak, WAYS["ring"], count=count)) for count in (1, 2, 4)}
    gathered = max(ranks.run(peak, WAYS["gather"]))
    # Some 30 MiB do not depend on the length.
    assert ring[2] < 0.8 * ring[1], ring
    assert ring[4] < 0.8 * ring[2], ring
    assert ring[4] < 0.55 * ring[1], ring
    keys = 2 * LENGTH * HEADS * WIDTH * 4 / 2**20
    assert gathered > ring[4] + 0.5 * keys, (ring, gathered)
