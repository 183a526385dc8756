"""ALiBi: a penalty on the distance of query and key, with slopes that are learned.

Press et al. (2022) fix the slopes; here they are a parameter, and nothing else changes.
"""

# %%
import torch

import tilewise

torch.manual_seed(0)
B, H, S, D = 1, 4, 200, 32
q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)


# %% A score is a function of the score s, batch item b, head h, query row m and key n.
def alibi(s, b, h, m, n):
    """Farther keys count for less."""
    return s - slopes[h] * abs(m - n)


out = tilewise.attention(q, k, v, mask=tilewise.masks.causal(), score=alibi)
print("output", tuple(out.shape))

# %% The same in plain torch, with the S x S matrix in memory.
distance = (torch.arange(S)[:, None] - torch.arange(S)).abs()
scores = q @ k.transpose(-1, -2) / D**0.5 - slopes[:, None, None] * distance
scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
plain = torch.softmax(scores, -1) @ v
print(f"largest difference {(out - plain).abs().max():.1e}")
assert torch.allclose(out, plain, atol=1e-5)

# %% The slopes get their gradient, exactly and without the matrix.
(found,) = torch.autograd.grad(out.square().sum(), slopes)
(expected,) = torch.autograd.grad(plain.square().sum(), slopes)
print("gradient of the slopes", [f"{x:.3f}" for x in found.tolist()])
assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
