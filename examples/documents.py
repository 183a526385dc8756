"""Documents packed into one sequence: each attends within itself, and all see a common prefix.

What no row of a tile may see is never computed.
"""

# %%
import time

import torch

import tilewise

torch.manual_seed(0)
S, D = 2048, 64
q, k, v = (torch.randn(1, 8, S, D) for _ in range(3))
document = torch.arange(S) // 256  # eight documents of 256 tokens
PREFIX = 32


# %% A mask is a function too. Masks compose with &, | and ~, functions and built-in ones alike.
def same_document(b, h, m, n):
    """Query and key are of one document."""
    return document[m] == document[n]


prefix = tilewise.masks.function(lambda b, h, m, n: n < PREFIX)
mask = tilewise.masks.causal() & (prefix | same_document)
out = tilewise.attention(q, k, v, mask=mask)

# %% The same in plain torch.
rows, keys = torch.arange(S)[:, None], torch.arange(S)
seen = (keys <= rows) & ((document[:, None] == document) | (keys < PREFIX))
scores = (q @ k.transpose(-1, -2) / D**0.5).masked_fill(~seen, -torch.inf)
assert torch.allclose(out, torch.softmax(scores, -1) @ v, atol=1e-5)
print(f"visible pairs: {seen.float().mean():.1%}")


# %% Skipping pays: less is visible, less is done.
def seconds(**keywords):
    """The best of three."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        tilewise.attention(q, k, v, **keywords)
        times.append(time.perf_counter() - begin)
    return min(times)


causal = seconds(mask=tilewise.masks.causal())
print(f"causal {causal * 1e3:.0f} ms, documents {seconds(mask=mask) * 1e3:.0f} ms")
