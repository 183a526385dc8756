"""Key lists on the GPU backend, in Triton's interpreter."""

from __future__ import annotations

import torch

import tilewise
from tests.contract import assert_exact
from tests.inputs import drawn
from tilewise import KeyBlocks, masks, scores


def test_key_lists_on_the_gpu_backend() -> None:
    """Forward and backward with mask and score, against the same lists on the reference."""
    q = drawn(1, 4, 5, 16).requires_grad_()
    k, v = (drawn(1, 2, 40, 16, seed=seed).requires_grad_() for seed in (1, 2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    lists = torch.randint(-1, 40, (1, 2, 5, 9), generator=torch.Generator().manual_seed(0))
    for keys in (lists, KeyBlocks(lists.clamp(max=9)[..., :3], 4)):
        results = []
        for backend, dtype in (("gpu", torch.float32), ("tiled", torch.float32), ("tiled", None)):
            leaves = [x.detach().to(dtype or torch.float64).requires_grad_() for x in (q, k, v)]
            out = tilewise.attention(
                *leaves,
                keys=keys,
                mask=masks.causal(),
                score=scores.alibi(slopes),
                backend=backend,
            )
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
        for name, got, plain, oracle in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            assert_exact(got, plain, oracle, name)
