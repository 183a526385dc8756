"""The loss of a language model without the logits of a whole micro-batch.

Logits of T tokens and a vocabulary of V take 4 T V bytes in float32, and some four times that with
their gradient: 17 GB for 32,768 tokens of each. Here the head and the loss see a few tokens at a
time, and a chunk's gradients are taken before the next one's logits are made. That needs the
products of the usual order and no others: nothing is computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from tilelab.models.gpt2 import GPT2
from tilelab.study.ask.config import Training
from tilelab.study.tasks.task import NO_TARGET, dtype_of, losses


class Features(NamedTuple):
    """What a head multiplies, and the matrix that it multiplies with."""

    hidden: Tensor  # [..., width]
    weight: Tensor  # [V, width]


class Headless(nn.Module):
    """A GPT-2 up to its head: ``chunked_losses`` does the rest."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Features:
        """Return the features of the inputs of ``GPT2.forward``."""
        return Features(self.model.features(*inputs), self.model.unembedding)


def chunked_losses(
    features: Features, targets: Tensor, training: Training
) -> tuple[Tensor, Tensor]:
    """Return what ``losses`` returns of the head's logits, to rounding.

    With n of N targets in a chunk, the objective is the sum of the chunks' times n / N, and so is
    the plain loss. Logits are in the run's precision, the loss in float32, and the gradient of the
    head is added up in its own type.

    Args:
        features: of a micro-batch.
        targets: [...] as those of ``losses``; at least one that counts.
        training: ``loss_tokens`` is the number of tokens of a chunk.

    Source: Hsu et al., Liger Kernel (2024), there as one kernel.
    """
    objective, plain = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]
        features.hidden.flatten(0, -2), features.weight, targets.flatten(), training
    )
    return objective, plain


class _ChunkedLosses(torch.autograd.Function):
    """The objective with its gradients, which the forward pass already has, and the plain loss."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, training: Training
    ) -> tuple[Tensor, Tensor]:
        size, dtype = training.loss_tokens, dtype_of(training.precision)
        if hidden.dtype == torch.float64:  # as ``losses`` lets it be
            dtype = hidden.dtype
        goals = torch.split(targets, size)
        counts = torch.stack([(each != NO_TARGET).sum() for each in goals]).tolist()
        head = weight.detach().to(dtype).requires_grad_()
        by_hidden, by_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        found = []
        for rows, goal, out, count in zip(
            torch.split(hidden, size), goals, torch.split(by_hidden, size), counts, strict=True
        ):
            if not count:
                continue
            # A chunk's own graph is gone before the next one's: nobody is to count it as kept.
            unseen = saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
            with torch.enable_grad(), unseen:
                own = rows.detach().to(dtype).requires_grad_()
                objective, plain = losses(
                    functional.linear(own, head),
                    goal,
                    label_smoothing=training.label_smoothing,
                    z_loss=training.z_loss,
                )
                objective = objective * (count / sum(counts))
            of_rows, of_head = torch.autograd.grad(objective, (own, head))
            out.copy_(of_rows)
            by_weight += of_head
            found.append(torch.stack((objective.detach(), plain * (count / sum(counts)))))
        ctx.save_for_backward(by_hidden, by_weight)
        objective, plain = torch.stack(found).sum(dim=0).unbind()
        ctx.mark_non_differentiable(plain)
        return objective, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * grad, by_weight * grad, None, None
