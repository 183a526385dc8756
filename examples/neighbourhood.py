"""Neighbourhood attention: a pixel sees the pixels around it (Hassani et al. 2023).

Queries and keys are pixels in reading order; division and remainder give row and column.
"""

# %%
import torch

import tilewise

torch.manual_seed(0)
HEIGHT, WIDTH, RADIUS, D = 24, 32, 3, 32
q, k, v = (torch.randn(1, 4, HEIGHT * WIDTH, D, requires_grad=True) for _ in range(3))


# %% Near the border the window moves inside, so that every pixel sees as many.
def near(b, h, m, n):
    """The key is at most RADIUS rows and columns from the middle of the query's window."""
    row = tilewise.minimum(tilewise.maximum(m // WIDTH, RADIUS), HEIGHT - 1 - RADIUS)
    column = tilewise.minimum(tilewise.maximum(m % WIDTH, RADIUS), WIDTH - 1 - RADIUS)
    return (abs(n // WIDTH - row) <= RADIUS) & (abs(n % WIDTH - column) <= RADIUS)


out = tilewise.attention(q, k, v, mask=near)
out.square().sum().backward()
print("output", tuple(out.shape), "gradient", tuple(q.grad.shape))

# %% The same with the matrix of all pairs.
pixel = torch.arange(HEIGHT * WIDTH)
seen = torch.zeros(len(pixel), len(pixel))
for m in range(len(pixel)):
    top = min(max(m // WIDTH, RADIUS), HEIGHT - 1 - RADIUS) - RADIUS
    left = min(max(m % WIDTH, RADIUS), WIDTH - 1 - RADIUS) - RADIUS
    window = torch.zeros(HEIGHT, WIDTH)
    window[top : top + 2 * RADIUS + 1, left : left + 2 * RADIUS + 1] = 1
    seen[m] = window.flatten()
assert (seen.sum(1) == (2 * RADIUS + 1) ** 2).all()
scores = (q @ k.transpose(-1, -2) / D**0.5).masked_fill(seen == 0, -torch.inf)
assert torch.allclose(out, torch.softmax(scores, -1) @ v, atol=1e-5)
print(f"each pixel sees {(2 * RADIUS + 1) ** 2} of {len(pixel)}")
