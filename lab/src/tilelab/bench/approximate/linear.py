"""Linear attention: a feature map in the place of the softmax."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import elu

__all__ = ["by_features", "linear"]


def linear(q: Tensor, k: Tensor, v: Tensor, *, keys: Tensor | None = None) -> Tensor:
    """``out = f(q) (f(k)^T v) / (f(q) sum f(k))`` with ``f = elu + 1``: O(N D Dv).

    Source: Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs", ICML 2020, equations
    4 to 7. It has no matrix of probabilities, so nothing is dropped.

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        keys: bool [N], which keys there are; None for all.
    """
    return by_features(elu(q) + 1, elu(k) + 1, v, keys)


def by_features(f_q: Tensor, f_k: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
    """Attention whose weights are products of features, by associativity.

    Args:
        f_q: features of the queries, [B, H, N, F], none below 0.
        f_k: of the keys.
        v: [B, H, N, Dv].
        keys: bool [N], which keys there are; None for all.
    """
    if keys is not None:
        f_k = f_k * keys[:, None].to(f_k.dtype)
    summed = f_k.sum(dim=2, keepdim=True)
    total = (f_q * summed).sum(-1, keepdim=True)
    return (f_q @ (f_k.mT @ v)) / total.clamp(min=1e-9)
