"""A learned table over distances: T5's buckets, Swin's windows, and what is between them.

The table is indexed by any integer expression. It trains under ``torch.compile``.
"""

# %%
import math

import torch
from torch import nn

import tilewise

torch.manual_seed(0)
HEADS, WIDTH, LONGEST = 4, 64, 128


# %% T5 shares a bucket between distances: exact ones up to 16, then logarithmic ones.
def bucket(distance):
    """Distances 0 to 15 as they are; beyond, 16 buckets that widen up to the longest."""
    far = 16 + torch.log(distance / 16) * (16 / math.log(LONGEST / 16))
    return tilewise.where(distance < 16, distance, tilewise.minimum(far.long(), 31))


class Attention(nn.Module):
    """Causal self-attention with a bias for every head and bucket of distance."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros(HEADS, 32))

    def forward(self, x):
        """[B, S, WIDTH] to the same."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        out = tilewise.attention(
            q,
            k,
            v,
            mask=lambda b, h, m, n: n <= m,
            score=lambda s, b, h, m, n: s + self.table[h, bucket(tilewise.maximum(m - n, 0))],
        )
        return self.out(out.transpose(1, 2).flatten(2))


# %% One step, eager and compiled: the same loss, the same gradient of the table.
layer = Attention()
x = torch.randn(2, 100, WIDTH)
results = []
for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
    layer.zero_grad()
    loss = run(x).square().mean()
    loss.backward()
    results.append((loss.item(), layer.table.grad.clone()))
(loss, grad), (compiled_loss, compiled_grad) = results
print(f"loss {loss:.6f}, compiled {compiled_loss:.6f}")
print(f"buckets with a gradient: {int((grad != 0).any(0).sum())} of 32")
assert torch.allclose(grad, compiled_grad, atol=1e-7)

# %% Swin: windows of 8 x 8 pixels, the table indexed by the difference in two directions.
SIDE = 8
table = torch.randn(HEADS, 15, 15, requires_grad=True)
q, k, v = (torch.randn(1, HEADS, SIDE * SIDE, 16) for _ in range(3))


def swin(s, b, h, m, n):
    """Row and column of both pixels by division and remainder."""
    return s + table[h, m // SIDE - n // SIDE + 7, m % SIDE - n % SIDE + 7]


tilewise.attention(q, k, v, score=swin).sum().backward()
print("gradient of Swin's table", tuple(table.grad.shape))
