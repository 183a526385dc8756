"""MSA: an index branch chooses the blocks that the query heads of a group read.

    s[m, n] = index_q[m] . index_k[n] / sqrt(Di)          one index query per group, one index key
    row m sees: its own block up to key m; the top_k - 1 earlier blocks of the largest max s[m, n]
    loss = KL(mean of p over the heads of the group || softmax of s), over the keys that m sees

The choice has no gradient, so the loss trains the index branch. The attention's p is its target
and gets no gradient from it.

Source: Lai et al., "MiniMax Sparse Attention", arXiv 2606.13392, 2026; MiniMax-M3 uses it with
blocks of 128 keys, top_k 16, and 16 query heads in each of 4 groups.
"""

# %%
import resource
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise

ROWS = 256  # scores of so many rows are in memory at a time


# %% Every index score is computed, as in the paper, but only the best of each block is kept.
@torch.no_grad()
def choose_blocks(index_q: Tensor, index_k: Tensor, block: int, top_k: int) -> Tensor:
    """Return the blocks that each row reads, int64 [B, Hk, M, up to top_k], -1 for none.

    Args:
        index_q: [B, Hk, M, Di], the last M rows of the sequence.
        index_k: [B, 1, N, Di].
        block: keys in a block.
        top_k: blocks that a row reads, its own included.
    """
    N, device = index_k.shape[2], index_q.device
    places, many, found = torch.arange(N, device=device), -(-N // block), []
    for q, row in zip(
        index_q.split(ROWS, 2), places[N - index_q.shape[2] :, None].split(ROWS), strict=True
    ):
        scores = (q @ index_k.mT).masked_fill_(places > row, -torch.inf)
        scores = functional.pad(scores, (0, many * block - N), value=-torch.inf)
        best = scores.unflatten(3, (many, block)).amax(4)
        best.masked_fill_(torch.arange(many, device=device) == row // block, torch.inf)
        score, blocks = best.topk(min(top_k, many))
        found.append(blocks.masked_fill(score == -torch.inf, -1))
    return torch.cat(found, 2)


def msa(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block: int = 128, **more: bool) -> Any:
    """Return attention over the chosen blocks [B, Hq, M, Dv], which takes O(M top_k block) memory.

    Args:
        q: [B, Hq, M, D], the last M rows of the sequence.
        k: [B, Hk, N, D].
        v: [B, Hk, N, Dv].
        blocks: of ``choose_blocks``.
        block: keys in a block.
        **more: keywords of ``tilewise.attention``.
    """
    keys = tilewise.KeyBlocks(blocks, block)
    return tilewise.attention(q, k, v, keys=keys, mask=tilewise.masks.causal(), **more)


# %% KL = lse of s - sum of p[n] s[n] - entropy of p. The sum is index_q . (sum of p[n] index_k[n])
# / sqrt(Di): attention with the index keys as values. So no probability is stored.
def index_loss(
    q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, blocks: Tensor, block: int = 128
) -> Tensor:
    """Return the KL loss, averaged over rows and groups, plus the target's entropy.

    The entropy has no gradient, so the gradients of index_q and index_k are those of the KL loss.

    Args:
        q: as in ``msa``, without gradient.
        k: the same.
        index_q: as in ``choose_blocks``.
        index_k: the same.
        blocks: of ``choose_blocks``.
        block: keys in a block.
    """
    index_k = index_k.expand(-1, k.shape[1], -1, -1)
    target = msa(q.detach(), k.detach(), index_k, blocks, block)
    target = target.unflatten(1, (k.shape[1], -1)).mean(2)
    score = (index_q * target).sum(-1) * index_q.shape[-1] ** -0.5
    return (
        msa(index_q, index_k, index_k[..., :1], blocks, block, return_lse=True).lse - score
    ).mean()


# %% The same by a mask, which has N x N elements for each group.
def dense(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block: int) -> Tensor:
    """Return attention over the chosen blocks, for as many rows as keys, in plain torch."""
    N, spare = k.shape[2], -(-k.shape[2] // block)  # spare stands for none
    seen = torch.zeros(*blocks.shape[:3], spare + 1, dtype=torch.bool)
    seen.scatter_(3, torch.where(blocks < 0, spare, blocks), True)
    mask = seen[..., :spare].repeat_interleave(block, 3)[..., :N].tril()
    mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], 1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def main() -> None:
    """Train an index branch for attention between topics, then compare time and memory."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    N, heads, block, top_k = 2048, 8, 64, 8
    topics = torch.randn(4, 64)
    of_keys = torch.randint(4, (N // block,)).repeat_interleave(block)  # one topic in a block
    x, y = (topics[t] + 0.5 * torch.randn(N, 64) for t in (torch.randint(4, (N,)), of_keys))
    q, k = (x + 0.3 * torch.randn(1, heads, N, 64)) / 3, y[None, None]
    v = torch.randn(1, 1, N, 64)
    branch = [nn.Linear(64, 16, bias=False) for _ in range(2)]
    index_q, index_k = (layer(z)[None, None] for layer, z in zip(branch, (x, y), strict=True))
    blocks = choose_blocks(index_q[:, :, -64:], index_k, block, top_k)
    msa(q[:, :, -64:], k, v, blocks, block)  # warm-up
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    blocks = choose_blocks(index_q, index_k, block, top_k)
    for name, attend in (("key lists", msa), ("a mask", dense)):
        begin = time.perf_counter()
        attend(q, k, v, blocks, block)
        seconds = time.perf_counter() - begin
        taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
        print(f"MSA by {name}: forward {seconds:.2f} s, {taken:.0f} MiB")
    whole = tilewise.attention(q, k, v, mask=tilewise.masks.causal(), return_lse=True).lse
    optimizer = torch.optim.Adam([layer.weight for layer in branch], lr=0.01)
    for step in range(21):
        index_q, index_k = (layer(z)[None, None] for layer, z in zip(branch, (x, y), strict=True))
        blocks = choose_blocks(index_q, index_k, block, top_k)
        if step % 20 == 0:
            mass = (msa(q, k, v, blocks, block, return_lse=True).lse - whole).exp().mean()
            print(f"step {step}: the chosen blocks hold {mass:.0%} of the attention")
        optimizer.zero_grad()
        index_loss(q, k, index_q, index_k, blocks, block).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
