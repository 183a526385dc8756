"""How much memory a run needs, estimated from its config before anything is started.

It counts what a GPT-2 is known to keep (the tests compare it with what was measured):

* weights, gradients and two numbers a weight of optimizer state, 4 bytes each;
* of each layer and token, what the backward pass reads again: 16 times the width in float32;
* B Hq N^2 probabilities of each layer, where the attention writes its matrix;
* the logits and their logarithms; what a single layer or the loss needs for a moment;
* a quarter more of what is kept, for freed blocks that the C library does not give back at once
  (measured: none where they are large, up to half where they are smaller than its threshold);
* the process itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.errors import TilewiseError
from tilewise.lab import memory
from tilewise.lab.study.config import RunConfig
from tilewise.lab.study.plan import Task

__all__ = ["Need", "NotEnoughMemoryError", "available_bytes", "need", "parameters", "room_for"]

VOCABULARY = {"bytes": 256, "gpt2": 50257}
_PROCESS_BYTES = 350_000_000  # Python, torch and what they load, measured
_FLOAT_BYTES = 4
# Bytes a unit of width that one layer keeps for each token. Autocast keeps the inputs of products
# in two bytes, but casts the norm's output once for each of query, key and value.
_LAYER_BYTES = {"float32": 64, "bf16": 43, "fp16": 43}
_ELEMENT_BYTES = {"float32": 4, "bf16": 2, "fp16": 2}
# At one moment a layer that writes its matrix holds scores, mask and gradients beside it.
_MATRICES_AT_ONCE = 3
_LOGITS_KEPT, _LOGITS_AT_ONCE = 2, 2
_KEPT_BY_ALLOCATOR = 4  # one part in so many


class NotEnoughMemoryError(TilewiseError):
    """A run would need more memory than there is."""


@dataclass(frozen=True)
class Need:
    """What a run needs, in bytes.

    Args:
        state: weights, gradients and optimizer.
        activations: kept of one micro-batch, without the matrix.
        matrix: the N x N matrices of attention, kept and at one moment; 0 where none is written.
        moment: what the loss needs for a moment.
        process: the process itself.
    """

    state: int
    activations: int
    matrix: int
    moment: int
    process: int = _PROCESS_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        freed = (self.activations + self.matrix) // _KEPT_BY_ALLOCATOR
        return self.state + self.activations + self.matrix + freed + self.moment + self.process


def parameters(config: RunConfig) -> int:
    """Weights of the model: V d + T d + L (12 d^2 + 13 d) + 2 d."""
    model = config.model
    width = model.width
    tables = (VOCABULARY[config.data.tokenizer] + model.context) * width
    return tables + model.layers * (12 * width**2 + 13 * width) + 2 * width


def need(config: RunConfig) -> Need:
    """The estimate for one run."""
    model, training = config.model, config.training
    tokens = training.batch * model.context
    precision = training.precision
    layer = _LAYER_BYTES[precision] * model.width * tokens
    if model.dropout.residual:
        layer += 2 * _FLOAT_BYTES * model.width * tokens  # the noise of two places
    square = _ELEMENT_BYTES[precision] * training.batch * model.heads * model.context**2
    kept = 0 if not writes_matrix(config) else square * (2 if model.dropout.attention else 1)
    if training.checkpointing:
        inputs = _FLOAT_BYTES * model.width * tokens * model.layers
        activations, matrix = inputs + layer, kept
    else:
        activations, matrix = layer * model.layers, kept * model.layers
    logits = _FLOAT_BYTES * tokens * VOCABULARY[config.data.tokenizer]
    return Need(
        state=4 * _FLOAT_BYTES * parameters(config),
        activations=activations + _LOGITS_KEPT * logits,
        matrix=matrix + (_MATRICES_AT_ONCE * square if kept else 0),
        moment=_LOGITS_AT_ONCE * logits,
    )


def writes_matrix(config: RunConfig) -> bool:
    """Whether the attention of a config writes its N x N matrix."""
    attention = config.attention
    if attention.implementation != "sdpa":
        return attention.implementation == "plain"
    # On a CPU its fused kernel knows no dropout, and any other variant is given to it as a matrix.
    return config.model.dropout.attention > 0 or attention.variant.name != "causal"


def available_bytes(device: str) -> int | None:
    """Memory of a device that new processes could take now; None where nobody knows."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return memory.available_bytes()


def room_for(tasks: Sequence[Task], jobs: int, available: int | None) -> int:
    """How many of the tasks may run at once.

    Args:
        tasks: what is to be run.
        jobs: how many at most.
        available: bytes; None where nobody knows, and then nothing is refused.

    Returns:
        at most ``jobs``, at least 1.

    Raises:
        NotEnoughMemoryError: a single one needs more than there is.
    """
    if available is None or not tasks:
        return jobs
    needs = sorted((need(task.run.config).total for task in tasks), reverse=True)
    if needs[0] > available:
        worst = max(tasks, key=lambda task: need(task.run.config).total)
        raise NotEnoughMemoryError(_too_much(worst, available))
    while jobs > 1 and sum(needs[:jobs]) > available:
        jobs -= 1
    return jobs


def _too_much(task: Task, available: int) -> str:
    run, wanted = task.run, need(task.run.config)
    largest = max(("activations", "matrix", "state"), key=lambda part: getattr(wanted, part))
    words, fix = _REMEDIES[largest]
    size = getattr(wanted, largest)
    return (
        f"arm {run.arm} of {run.experiment} needs about {_gb(wanted.total)} of memory, and "
        f"{_gb(available)} are free. Most of it, {_gb(size)}, is {words}: {fix}"
    )


_REMEDIES = {
    "activations": (
        "what the backward pass reads again",
        "use a smaller training.batch (with more training.accumulation the step stays the same), "
        "a smaller model.context, or training.checkpointing=true",
    ),
    "matrix": (
        "the N x N matrices of its attention",
        "use attention.implementation=tilewise, which writes none, a smaller model.context or "
        "a smaller training.batch",
    ),
    "state": (
        "weights, gradients and optimizer state",
        "use a smaller model.width or fewer model.layers",
    ),
}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
