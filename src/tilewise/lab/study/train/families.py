"""The models of the study: from a run's config to weights."""

from __future__ import annotations

import torch

from tilewise.lab.models.gpt2 import GPT2, Shape
from tilewise.lab.study.choices import variants
from tilewise.lab.study.config import Model, RunConfig
from tilewise.lab.study.train.nudge import nudge

__all__ = ["gpt2_of"]


def gpt2_of(config: RunConfig, vocabulary: int, seed: int, device: torch.device) -> GPT2:
    """The GPT-2 of a run: its weights depend on its shape and the seed alone.

    Args:
        config: of the run.
        vocabulary: of its tokens.
        seed: of the weights.
        device: where it shall be.
    """
    heads = variants.Heads(config.model.heads, device, config.model.context)
    variation = variants.build(config.attention.variant, heads)
    model = GPT2(
        _shape(config.model, vocabulary),
        implementation=config.attention.implementation,
        mask=variation.mask,
        score=variation.score,
        pattern=variation.pattern,
        seed=seed,
        checkpointing=config.training.checkpointing,
    )
    if config.model.nudge:
        nudge(model, seed)
    return model.to(device)


def _shape(model: Model, vocabulary: int) -> Shape:
    return Shape(
        layers=model.layers,
        heads=model.heads,
        width=model.width,
        context=model.context,
        vocabulary=vocabulary,
        embedding_dropout=model.dropout.embedding,
        attention_dropout=model.dropout.attention,
        residual_dropout=model.dropout.residual,
        kv_heads=model.kv_heads,
        positions=model.positions,
        norm=model.norm,
        qk_norm=model.qk_norm,
    )
