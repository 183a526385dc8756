"""NSA: three attentions with keys of their own, mixed by gates.

    compressed   one key and value for every ``length`` tokens, ``stride`` apart, by a small MLP
    selected     the blocks whose tokens get most of the compressed attention, ``top_k`` of them
    window       the last ``window`` tokens
    out = sum of sigmoid(gate) * attention over the three

A row sees a compressed key once all its tokens are in the past. The first block, the row's own and
the one before are always selected. The heads of a group select together, by the sum of their
probabilities. The selection has no gradient; compression learns through its own attention.

Source: Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse
Attention", arXiv 2502.11089, 2025, equations 5 to 11; the defaults are those of section 4.1.
"""

# %%
import resource
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise

ROWS = 256  # compressed probabilities of so many rows are in memory at a time


class Sizes(NamedTuple):
    """Tokens of a compressed key and between two, of a block and of the window; top_k blocks."""

    length: int = 32
    stride: int = 16
    block: int = 64
    top_k: int = 16
    window: int = 512


PAPER = Sizes()


class Compress(nn.Module):
    """An MLP over the tokens of a compressed key, each with a learned vector for its position."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.position = nn.Parameter(torch.randn(sizes.length, width) * 0.02)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.length * width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H, compressed, D] of keys or values x [B, H, N, D]."""
        length, stride = self.sizes.length, self.sizes.stride
        many = max(0, (x.shape[2] - length) // stride + 1)
        x = functional.pad(x, (0, 0, 0, max(0, length - x.shape[2])))
        parts = x.unfold(2, length, stride)[:, :, :many].mT
        return self.mlp((parts + self.position).flatten(3))


# %% Scores of blocks: N x N / stride probabilities, a few rows at a time.
@torch.no_grad()
def choose_blocks(q: Tensor, k: Tensor, lse: Tensor, sizes: Sizes) -> Tensor:
    """Return the blocks that each row selects, int64 [B, Hk, N, up to top_k], -1 for none.

    Args:
        q: [B, Hq, N, D].
        k: compressed keys [B, Hk, compressed, D].
        lse: of the compressed attention, [B, Hq, N].
        sizes: ``block`` and ``length`` are multiples of ``stride``.
    """
    N, groups, per_block = q.shape[2], k.shape[1], sizes.block // sizes.stride
    many, spread = -(-N // sizes.block), sizes.length // sizes.stride
    last = torch.arange(k.shape[2], device=q.device) * sizes.stride + sizes.length - 1
    blocks, found = torch.arange(many, device=q.device), []
    for row in torch.arange(N, device=q.device).split(ROWS):
        some = q[:, :, row].unflatten(1, (groups, -1))
        s = some @ k[:, :, None].mT * q.shape[3] ** -0.5
        p = (s - lse[:, :, row].unflatten(1, (groups, -1))[..., None]).exp()
        p = p.masked_fill(last > row[:, None], 0).sum(2)
        # Each compressed key counts for every stride of tokens that it covers.
        p = functional.pad(p, (spread - 1, many * per_block - k.shape[2]))
        p = p.unfold(3, spread, 1).sum(4)[..., : many * per_block]
        score = p.unflatten(3, (many, per_block)).sum(4)
        own = row[:, None] // sizes.block
        score.masked_fill_((blocks == 0) | (blocks >= own - 1), torch.inf)
        score.masked_fill_(blocks > own, -torch.inf)
        best, chosen = score.topk(min(sizes.top_k, many))
        found.append(chosen.masked_fill(best == -torch.inf, -1))
    return torch.cat(found, 2)


class NativeSparseAttention(nn.Module):
    """Causal self-attention [B, N, width]; its memory follows N (top_k block + window).

    Args:
        width: of the tokens.
        heads: query heads.
        groups: key heads; the query heads of a group select together.
        head: width of a head.
        sizes: of the three branches.
    """

    def __init__(
        self, width: int, heads: int, groups: int, head: int, sizes: Sizes = PAPER
    ) -> None:
        super().__init__()
        self.groups, self.head, self.sizes = groups, head, sizes
        self.q = nn.Linear(width, heads * head, bias=False)
        self.kv = nn.Linear(width, 3 * 2 * groups * head, bias=False)
        self.gates = nn.Linear(width, 3 * heads)
        self.compress_k, self.compress_v = Compress(head, sizes), Compress(head, sizes)
        self.out = nn.Linear(heads * head, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, N, width] of tokens x [B, N, width]."""
        q = self.q(x).unflatten(2, (-1, self.head)).transpose(1, 2)
        kv = self.kv(x).unflatten(2, (3, 2, self.groups, self.head)).permute(2, 3, 0, 4, 1, 5)
        (k, v), (k_selected, v_selected), (k_window, v_window) = kv
        _, stride, block, _, window = self.sizes
        last = self.sizes.length - 1
        k, v = self.compress_k(k), self.compress_v(v)
        compressed, lse, _ = tilewise.attention(
            q, k, v, mask=lambda b, h, m, n: n * stride + last <= m, return_lse=True
        )
        keys = tilewise.KeyBlocks(choose_blocks(q, k, lse, self.sizes), block)
        causal, near = tilewise.masks.causal(), tilewise.masks.window(window - 1, 0)
        selected = tilewise.attention(q, k_selected, v_selected, keys=keys, mask=causal)
        local = tilewise.attention(q, k_window, v_window, mask=near)
        gates = self.gates(x).sigmoid().unflatten(2, (-1, 3)).transpose(1, 2)
        mixed = (gates[..., None] * torch.stack((compressed, selected, local), 3)).sum(3)
        return self.out(mixed.transpose(1, 2).flatten(2))


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in plain torch."""
    s = q @ k.mT * q.shape[3] ** -0.5
    hidden = torch.ones(s.shape[2:], dtype=torch.bool).triu(1)
    return s.masked_fill(hidden, -torch.inf).softmax(3) @ v


def main() -> None:
    """Compare time and memory with dense attention, and train for a few steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = NativeSparseAttention(64, 16, 1, 32, Sizes(16, 8, 32, 6, 128))
    x = torch.randn(1, 2048, 64)
    q, k, v = (torch.randn(1, heads, 2048, 32, requires_grad=True) for heads in (16, 1, 1))
    model(x[:, :128]).sum().backward()  # warm-up
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, attend in (("NSA", lambda: model(x)), ("Dense", lambda: dense(q, k, v))):
        begin = time.perf_counter()
        attend().sum().backward()
        seconds = time.perf_counter() - begin
        taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
        print(f"{name}: forward and backward {seconds:.1f} s, {taken:.0f} MiB")
    # Each token learns the mean of those up to it.
    x = x[:, :256]
    target = x.cumsum(1) / torch.arange(1, 257)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(21):
        loss = functional.mse_loss(model(x), target)
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.4f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
