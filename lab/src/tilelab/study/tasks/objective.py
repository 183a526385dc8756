"""The objective of a step, and the recorded loss: a factor may change the objective."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["losses"]

_NONE = -100  # a target that is none


def losses(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the objective and the plain cross-entropy, both means over tokens in nats.

    With log-probabilities l and the partition sum Z of a token's logits, V tokens in all::

        objective = mean(-(1 - label_smoothing) l[target] - label_smoothing sum(l) / V
                         + z_loss log(Z)^2)

    Computed in float32 whatever the logits' type (float64 stays).

    Args:
        logits: [B, S, V].
        targets: [B, S]; -100 for a token that has none and does not count.
        label_smoothing: share of the target that goes to all tokens evenly, in [0, 1).
        z_loss: factor of log(Z)^2, which keeps logits from drifting.

    Returns:
        the objective, with its graph, and the cross-entropy without one.

    Sources: Szegedy et al. (2016), section 7; z-loss: Chowdhery et al., PaLM (2022), section 5.
    """
    rows, targets = logits.flatten(0, 1), targets.flatten()
    rows = rows if rows.element_size() >= 4 else rows.float()
    if not label_smoothing and not z_loss:
        plain = functional.cross_entropy(rows, targets, ignore_index=_NONE)
        return plain, plain.detach()
    counted = targets != _NONE
    if not bool(counted.all()):
        rows, targets = rows[counted], targets[counted]
    log_probabilities = rows.log_softmax(dim=-1)
    plain = functional.nll_loss(log_probabilities, targets)
    even = -log_probabilities.mean()
    objective = (1.0 - label_smoothing) * plain + label_smoothing * even
    if z_loss:
        objective = objective + z_loss * rows.logsumexp(dim=-1).square().mean()
    return objective, plain.detach()
