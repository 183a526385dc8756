"""Differential attention: the difference of two attention maps over the same values, in one call.

    out = norm(softmax(q1 k1^T / sqrt(D)) v - lambda softmax(q2 k2^T / sqrt(D)) v) (1 - lambda0)
    lambda = exp(a1 . b1) - exp(a2 . b2) + lambda0

What both maps give to unimportant keys cancels. The heads of both maps are heads of one call, and
the difference is taken of its output; no map is ever in memory.

Source: Ye et al., "Differential Transformer", arXiv 2410.05258, 2024, section 2.1.
"""

# %%
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise


def differential(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: tilewise.masks.Mask | None = None
) -> Tensor:
    """Return ``map1 v - weight map2 v``, [B, H, M, Dv].

    Args:
        q: [B, 2, H, M, D], the queries of both maps.
        k: [B, 2, Hk, N, D]; H is a multiple of Hk.
        v: [B, Hk, N, Dv], shared by both maps.
        weight: lambda: a number, or what goes with [B, H, M, Dv].
        mask: of both maps.
    """
    both = v[:, None].expand(-1, 2, -1, -1, -1)
    # Map after map in the batch, so that no head of a map reads the keys of the other.
    out = tilewise.attention(q.flatten(0, 1), k.flatten(0, 1), both.flatten(0, 1), mask=mask)
    one, two = out.unflatten(0, (-1, 2)).unbind(1)
    return one - weight * two


class DifferentialAttention(nn.Module):
    """A causal layer of the paper.

    Args:
        width: of the residual stream.
        heads: pairs of maps; each reads width / heads channels of the values.
        layer: its number, from 1, on which lambda0 depends.
    """

    def __init__(self, width: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, dim = heads, width // heads // 2
        self.start = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
        self.joint = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mix = nn.Parameter(0.1 * torch.randn(4, dim))
        self.norm = nn.RMSNorm(2 * dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] -> [B, S, width]."""
        q, k, v = self.joint(x).chunk(3, -1)
        q, k = (each.unflatten(-1, (2, self.heads, -1)).permute(0, 2, 3, 1, 4) for each in (q, k))
        v = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        a1, b1, a2, b2 = self.mix
        weight = (a1 @ b1).exp() - (a2 @ b2).exp() + self.start
        out = differential(q, k, v, weight, tilewise.masks.causal())
        out = self.norm(out) * (1 - self.start)
        return self.output(out.transpose(1, 2).flatten(2))


# %% The same with both maps in memory.
def with_maps(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Return ``differential`` under a causal mask, by N x N matrices; for Hk = H."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    one, two = scores.masked_fill(~seen, -torch.inf).softmax(-1).unbind(1)
    return (one - weight * two) @ v


def main() -> None:
    """Check the output and the gradients, and train a layer to copy the token before."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 2, 3, 40, 8), torch.randn(2, 2, 3, 40, 8), torch.randn(2, 3, 40, 16)]
    leaves = [each.double().requires_grad_() for each in (*leaves, torch.tensor(0.7))]
    ours = differential(*leaves, tilewise.masks.causal())
    theirs = with_maps(*leaves)
    grads = [torch.autograd.grad(each.sin().sum(), leaves) for each in (ours, theirs)]
    pairs = [(ours, theirs), *zip(*grads, strict=True)]
    error = max((one - other).abs().max().item() for one, other in pairs)
    assert error < 1e-12
    print(f"output and gradients differ by {error:.0e} at most from those of two maps")

    table, layer = torch.randn(16, 32), DifferentialAttention(32, 2, layer=1)
    places = nn.Parameter(0.1 * torch.randn(16, 32))
    optimizer = torch.optim.AdamW([*layer.parameters(), places], lr=0.01)
    losses = []
    for _ in range(120):
        words = torch.randint(0, 16, (8, 16))
        found = layer(table[words] + places) @ table.T
        losses.append(functional.cross_entropy(found[:, 1:].flatten(0, 1), words[:, :-1].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    print(f"copying the token before: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
