"""Tiles that no pair of is visible are never computed: what they hold reaches nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cases import FLOATS, Case
from tests.contract import assert_same_bits
from tests.inputs import build
from tests.kernels.targets import Target
from tests.oracle import Sent, attend
from tilewise import masks
from tilewise.variants.values import Mask, as_mask

N, CUT = 512, 256
IDS = torch.arange(N) // CUT


def _blocks(batch: int = 1, heads: int = 1) -> Tensor:
    """[batch, heads, N, N]: the rows of a half see the keys of their own half."""
    return (IDS[:, None] == IDS).expand(batch, heads, N, N).clone()


def _second(per_batch: bool) -> Mask:
    """The second half as a document of its own, the ids the same or other ones per batch."""
    ids = torch.stack([IDS, IDS * 7 - 3]) if per_batch else IDS
    return masks.document(ids)


# Each says which rows see which keys: those before CUT see those before CUT, the rest the rest.
MASKS: dict[str, Callable[[], Mask]] = {
    "document": lambda: _second(False),
    "document-each": lambda: _second(True),
    "dense": lambda: as_mask(_blocks()),
    "dense-each": lambda: as_mask(_blocks(2, 2)),
    "dense-strided": lambda: as_mask(_blocks().mT),
    "document-and-causal": lambda: _second(False) & masks.causal(),
    "dense-and-window": lambda: as_mask(_blocks()) & masks.window(100, 100),
    "document-or-dense": lambda: _second(True) | _blocks(),
    "not-other": lambda: ~masks.document(IDS, 1 - IDS),
    "not-dense": lambda: ~as_mask(~_blocks()),
    "nested": lambda: ~(~_second(False) | ~as_mask(_blocks(1, 2))) & masks.window(None, 300),
}


@pytest.mark.parametrize("name", MASKS)
def test_nan_in_empty_tiles(target: Target, name: str) -> None:
    """Half of the keys, values and queries are NaN; the other half's bits do not change."""
    dtype = FLOATS[(list(MASKS).index(name) + target.rank) % 4]
    case = Case(f"empty-{name}", queries=N, keys=N, head_dim=16, value_dim=16, dtype=dtype)
    inputs = build(case)._replace(mask=MASKS[name]())
    rows = inputs.q.shape[:-1]
    grad_lse = torch.ones(rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    sent = Sent(torch.ones(*rows, 16, dtype=dtype), grad_lse)
    clean = attend(inputs, target.backend, sent)
    for poisoned in (inputs.k[:, :, CUT:], inputs.v[:, :, CUT:], inputs.q[:, :, CUT:]):
        with torch.no_grad():
            poisoned.fill_(float("nan"))
        got = attend(inputs, target.backend, sent)
        assert bool(got.out[:, :, CUT:].isnan().all())
        assert_same_bits(got.out[:, :, :CUT], clean.out[:, :, :CUT], "out")
        assert_same_bits(got.lse[:, :, :CUT], clean.lse[:, :, :CUT], "lse")
        for leaf, grad in clean.grads.items():
            assert_same_bits(got.grads[leaf][:, :, :CUT], grad[:, :, :CUT], f"grad of {leaf}")
