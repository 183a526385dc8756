"""Local and global attention on a long sequence (Longformer, Beltagy et al. 2020).

Tokens see their neighbourhood, and a few global ones see and are seen by all. The work goes with
the tiles in which anything is visible.
"""

# %%
import time

import torch

import tilewise

torch.manual_seed(0)
S, D, REACH, GLOBAL = 8192, 64, 256, 16
q, k, v = (torch.randn(1, 2, S, D) for _ in range(3))


# %%
def local_and_global(b, h, m, n):
    """Near, or one of the global tokens."""
    return (abs(m - n) <= REACH) | (m < GLOBAL) | (n < GLOBAL)


def seconds(mask):
    """Processor time of one call."""
    begin = time.thread_time()
    tilewise.attention(q, k, v, mask=mask)
    return time.thread_time() - begin


torch.set_num_threads(1)
sparse, full = (min(seconds(mask) for _ in range(2)) for mask in (local_and_global, None))
visible = (2 * REACH + 1 + 2 * GLOBAL) / S
print(f"about {visible:.0%} of all pairs are visible: {full / sparse:.1f} times faster than all")
assert sparse < full

# %% It is exact: the first rows and some of the others against the definition.
out = tilewise.attention(q, k, v, mask=local_and_global)
for row in (0, GLOBAL, 1000, S - 1):
    keys = torch.arange(S)
    seen = ((row - keys).abs() <= REACH) | (keys < GLOBAL) | (row < GLOBAL)
    scores = (k @ q[:, :, row, :, None]).squeeze(-1) / D**0.5
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    expected = (weights[..., None] * v).sum(2)
    assert torch.allclose(out[:, :, row], expected, atol=1e-5)
print("exact")
