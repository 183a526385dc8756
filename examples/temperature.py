"""A temperature for each head and a soft cap, learned with everything else.

Any tensor that a score reads is a parameter if you want it to be.
"""

# %%
import torch
from torch import nn

import tilewise

torch.manual_seed(0)


class Scaled(nn.Module):
    """s -> cap * tanh(temperature[h] * s / cap)."""

    def __init__(self, heads, cap):
        super().__init__()
        self.temperature, self.cap = nn.Parameter(torch.ones(heads)), cap

    def forward(self, s, b, h, m, n):
        """The score of a pair."""
        return self.cap * torch.tanh(self.temperature[h] * s / self.cap)


# %% A module is a function, and its parameters are the layer's.
layer = tilewise.nn.Attention(64, 4, mask=tilewise.masks.causal(), score=Scaled(4, 20.0))
print("parameters", [name for name, _ in layer.named_parameters()])

# %% Train it to copy the token of four steps ago: heads sharpen what they look at.
optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
place = torch.randn(48, 64)
losses = []
for _ in range(60):
    x = torch.randn(8, 48, 64)
    loss = (layer(x + place)[:, 4:] - x[:, :-4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print("temperatures", [f"{x:.2f}" for x in layer.score.temperature.tolist()])
assert losses[-1] < losses[0]
assert (layer.score.temperature != 1).all()
