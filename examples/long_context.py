"""A long sequence over several processes.

A small GPT-2 trains on one sequence of bytes that several processes hold in parts. Each of them has
its own rows of tokens, positions and labels; attention sees the whole sequence. So loss and
gradients are those of one process, and each process takes a share of the memory::

    python examples/long_context.py                                   # seconds
    python examples/long_context.py --tokens 65536 --processes 4      # minutes

On GPUs start it by ``torchrun``, with ``"nccl"`` for ``"gloo"`` and ``"cuda"`` for ``"cpu"``.
"""

# %%
import argparse
import resource
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tilewise
from tilewise.distributed import context_parallel

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)


# %%
class Block(nn.Module):
    """Attention and a perceptron; nothing in it knows of other processes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = tilewise.nn.Attention(width, width // 64, mask=tilewise.masks.causal())
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, rows, width]."""
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


class GPT2(nn.Module):
    """Bytes and learned positions in, the loss of the next bytes out."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for each in (self.bytes, self.places):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of these rows."""
        hidden = self.norm(self.blocks(self.bytes(ids) + self.places(positions)))
        return tilewise.linear_cross_entropy(
            hidden.flatten(0, 1), self.bytes.weight, labels.flatten(), reduction="sum"
        )


def text(count: int) -> Tensor:
    """The first bytes of Python's standard library."""
    found = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += file.read_bytes()
        if len(found) >= count:
            break
    return torch.frombuffer(bytearray(found[:count]), dtype=torch.uint8).long()[None]


# %% ``context_parallel`` cuts the three buffers and puts them back. The gradients are added up
# afterwards, because each process has those of its own rows.
def train(
    rank: int, asked: argparse.Namespace, processes: int, store: str, told: list[str]
) -> None:
    """Train as one of so many processes; the first one writes the losses and all their memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(0)
    model = GPT2(asked.tokens, asked.width, asked.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = text(asked.tokens + 1)
    ids, labels = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    positions = torch.arange(asked.tokens)[None]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(asked.steps):
        with context_parallel(mesh, buffers=[ids, positions, labels], buffer_seq_dims=[1, 1, 1]):
            loss = model(ids, positions, labels) / asked.tokens
            optimizer.zero_grad()
            loss.backward()
        found = loss.detach()
        for each in (found, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(each)
        optimizer.step()
        if rank == 0:
            told.append(f"loss {found.item():.4f}")
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    every = [torch.zeros(()) for _ in range(processes)]
    dist.all_gather(every, torch.tensor(taken))
    if rank == 0:
        told.append("MiB of each: " + ", ".join(f"{each.item():.0f}" for each in every))
    dist.destroy_process_group()


# %%
if __name__ == "__main__":
    arguments = parser.parse_args()
    losses = []
    for count in (1, arguments.processes):
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            said = manager.list()
            mp.spawn(train, (arguments, count, f"{folder}/store", said), nprocs=count)
            print(f"{arguments.tokens} tokens, {count} process(es): {'; '.join(said)}")
            losses.append([float(each.split()[1]) for each in said if each.startswith("loss")])
    alone, together = losses
    assert all(abs(a - b) < 2e-3 for a, b in zip(alone, together, strict=True)), "the same losses"
