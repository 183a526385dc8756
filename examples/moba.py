"""MoBA: a row reads its own block of keys, and the earlier blocks whose mean key it likes best.

    s[m, i] = q[m] . mean of the keys of block i          for the blocks i before the row's own
    row m sees: its own block up to key m; the top_k - 1 blocks of the largest s[m, i]

Every query head has its own choice. It is a hard one: no gradient goes through it, and the keys
learn through the attention alone.

Source: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv 2502.13189, 2025,
section 2.2. As in the authors' code, the row's own block counts as one of the top_k.
"""

# %%
import resource
import time

import torch
from torch import Tensor
from torch.nn import functional

import tilewise


# %% The choice takes a score for each row and block: N x N / block numbers, and nothing N x N.
@torch.no_grad()
def choose_blocks(q: Tensor, k: Tensor, block: int, top_k: int) -> Tensor:
    """Return the blocks that each row reads, int64 [B, H, M, up to top_k], -1 for none.

    Args:
        q: [B, H, M, D], the last M rows of the sequence.
        k: [B, H, N, D].
        block: keys in a block.
        top_k: blocks that a row reads, its own included.
    """
    own = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None] // block
    full = k.shape[2] // block  # a last block with fewer keys is before no row
    means = k[:, :, : full * block].unflatten(2, (full, block)).mean(3)
    scores = q @ means.mT
    scores.masked_fill_(torch.arange(full, device=q.device) >= own, -torch.inf)
    best, blocks = scores.topk(min(top_k - 1, full))
    return torch.cat([own.expand(*q.shape[:3], 1), blocks.masked_fill(best == -torch.inf, -1)], 3)


def moba(q: Tensor, k: Tensor, v: Tensor, block: int = 512, top_k: int = 3) -> Tensor:
    """Return MoBA attention [B, Hq, M, Dv]; the memory it takes follows M x top_k x block.

    Args:
        q: [B, Hq, M, D], the last M rows of the sequence.
        k: [B, Hk, N, D]; Hq is a multiple of Hk.
        v: [B, Hk, N, Dv].
        block: keys in a block.
        top_k: blocks that a row reads, its own included.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    blocks = tilewise.KeyBlocks(choose_blocks(q, k, block, top_k), block)
    return tilewise.attention(q, k, v, keys=blocks, mask=tilewise.masks.causal())


# %% The same by a mask, which has N x N elements for each head.
def dense(q: Tensor, k: Tensor, v: Tensor, block: int, top_k: int) -> Tensor:
    """Return MoBA attention of as many rows as keys, in plain torch."""
    N = k.shape[2]
    blocks = choose_blocks(q, k, block, top_k)
    spare = -(-N // block)  # stands for none
    seen = torch.zeros(*blocks.shape[:3], spare + 1, dtype=torch.bool)
    seen.scatter_(3, torch.where(blocks < 0, spare, blocks), True)
    mask = seen[..., :spare].repeat_interleave(block, dim=3)[..., :N].tril()
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def main() -> None:
    """Compare time, memory and gradients of both at 4,096 tokens."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2, 4096, 64, requires_grad=True) for _ in range(3))
    moba(*(x[:, :, :128] for x in (q, k, v)), 64, 3).sum().backward()  # warm-up
    start, grads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for name, attend in (("key lists", moba), ("a mask", dense)):
        begin = time.perf_counter()
        out = attend(q, k, v, 64, 3)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
        seconds = time.perf_counter() - begin
        taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
        print(f"MoBA by {name}: forward and backward {seconds:.1f} s, {taken:.0f} MiB")
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


if __name__ == "__main__":
    main()
