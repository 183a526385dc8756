"""The loss of a large vocabulary without its logits: ``linear_cross_entropy``.

    z = hidden @ weight^T        loss = mean of lse(z) - z[target] + z_loss * lse(z)^2

Plain code keeps tokens x words logits, and as many gradients of them. Here a block of logits
becomes its part of the loss and of the gradients, and the next block is written over it.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009,
2024; z-loss: Chowdhery et al., "PaLM", arXiv 2204.02311, 2022, section 5.
"""

# %%
import resource
import time

import torch
from torch.nn import functional

import tilewise

torch.manual_seed(0)
torch.set_num_threads(1)
TOKENS, WIDTH, WORDS, Z_LOSS = 2048, 128, 16000, 1e-4
hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
weight = (torch.randn(WORDS, WIDTH) * WIDTH**-0.5).requires_grad_()
targets = torch.randint(WORDS, (TOKENS,))
targets[::10] = -100  # ignored: no loss and no gradient


def ours(hidden, weight, targets):
    """Return the loss from blocks of logits."""
    return tilewise.linear_cross_entropy(hidden, weight, targets, z_loss=Z_LOSS)


def plain(hidden, weight, targets):
    """Return the loss from all logits."""
    z = hidden @ weight.T
    lse = z.logsumexp(-1)[targets >= 0]
    return functional.cross_entropy(z, targets) + Z_LOSS * lse.square().mean()


# %% Ours comes first: the peak of a process never falls.
ours(hidden[:64], weight, targets[:64]).backward()  # warm-up
start, results = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
for name, loss in (("blocks of logits", ours), ("all logits", plain)):
    begin = time.perf_counter()
    value = loss(hidden, weight, targets)
    grads = torch.autograd.grad(value, (hidden, weight))
    seconds = time.perf_counter() - begin
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    print(f"{name}: loss {value.item():.4f}, {seconds:.2f} s, {taken:.0f} MiB")
    results.append((value, *grads))

# %% The same loss and gradients.
for one, other in zip(*results, strict=True):
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
print("the same loss and gradients")
