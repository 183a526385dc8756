"""A byte-level language model in plain torch, after the manner of small training scripts.

``git diff`` against a script without the study would show the lines that end in ``# study``.
"""

from __future__ import annotations

import argparse
import json  # study
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps")
parser.add_argument("--schedule", choices=("cosine", "linear"), default="cosine")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--out", type=Path, default=Path("out"))
options = parser.parse_args()

torch.manual_seed(options.seed)
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 32, 2, 2, 64, 8
source = Path(sysconfig.get_paths()["stdlib"])
text = b"".join((source / name).read_bytes() for name in ("argparse.py", "typing.py"))
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
train_data, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


class Block(nn.Module):
    """Causal attention, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, [batch, tokens, width]."""
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0)
        q, k, v = (each.transpose(1, 2) for each in split)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A GPT of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the mean loss of [batch, context + 1] bytes, in nats."""
        x = self.tokens(rows[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def batch_of(part: Tensor, size: int) -> Tensor:
    """Return ``size`` rows of a text, drawn at random."""
    starts = torch.randint(len(part) - CONTEXT, (size,))
    return torch.stack([part[at : at + CONTEXT + 1] for at in starts])


def share_at(step: int) -> float:
    """Return the learning rate of a step as a share of the largest."""
    warm = max(1, round(options.warmup * options.steps))
    if step < warm:
        return (step + 1) / warm
    left = 1 - (step - warm) / max(1, options.steps - warm)
    return left if options.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)


model = Model()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=options.lr, weight_decay=options.weight_decay, betas=(0.9, 0.95)
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_at)
rows = torch.stack([held_out[at : at + CONTEXT + 1] for at in range(0, 64 * CONTEXT, CONTEXT)])
for step in range(1, options.steps + 1):
    loss = model(batch_of(train_data, BATCH))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    line = {"step": step, "loss": loss.item(), "tokens": step * BATCH * CONTEXT}  # study
    if step % 25 == 0 or step == options.steps:
        with torch.no_grad():
            line["val_loss"] = model(rows).item()  # study
    print(json.dumps(line), flush=True)  # study
options.out.mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), options.out / "model.pt")
