"""Estimate the memory of a run from its config, before anything is started.

It counts what a GPT-2 is known to keep (the tests compare it with measurements), a BERT and a ViT.
A BERT's sequences are taken to fill the context, which is the most that they can. The parts:

* weights, gradients and two numbers a weight of optimizer state, 4 bytes each;
* of each layer and token, what the backward pass reads again: 16 times the width in float32;
* B Hq N^2 probabilities of each layer, where the attention writes its matrix;
* the logits and their logarithms; what a single layer or the loss needs for a moment. With
  ``training.loss_tokens`` that is for a chunk of tokens, beside the gradients of all and the head;
* a quarter more of what is kept, for freed blocks that the C library does not give back at once.
  Measured: none for matrices of 32 MiB (its threshold) or more, up to half of smaller blocks;
* the process itself.

All of this follows from the config alone. The memory of the task's data depends on its files, and
only ``host_need`` looks at them. ``room_for`` says how many runs fit into the memory that is free,
or what to change so that one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tilelab.common import memory
from tilelab.study.ask.config import Data, RunConfig
from tilelab.study.ask.run import RunSpec
from tilewise.errors import TilewiseError

VOCABULARY = {"bytes": 256, "gpt2": 50257, "wordpiece": 30522, "listops": 16}
_CHANNELS, _PATCH = 3, 16  # of images and of tasks that say nothing of them
_PROCESS_BYTES = 350_000_000  # Python, torch and what they load, measured
_FLOAT_BYTES = 4
# Bytes a unit of width that one layer keeps for each token. Autocast keeps the inputs of products
# in two bytes, but casts the norm's output once for each of query, key and value.
_LAYER_BYTES = {"float32": 64, "bf16": 43, "fp16": 43}
_ELEMENT_BYTES = {"float32": 4, "bf16": 2, "fp16": 2}
# Of a probability, kept and at one moment: on a GPU autocast has the softmax in float32, and keeps
# it beside the half that the next product reads. On a CPU it is in half.
_GPU_HALF_BYTES = (6, 4)
# At one moment a layer that writes its matrix holds scores, mask and gradients beside it.
_MATRICES_AT_ONCE = 3
_LOGITS_KEPT, _LOGITS_AT_ONCE = 2, 2
_KEPT_BY_ALLOCATOR = 4  # one part in so many
_GIVEN_BACK_BYTES = 32 << 20  # glibc's largest threshold for memory of its own mapping


@dataclass(frozen=True)
class Need:
    """The memory of a run, in bytes."""

    state: int  # weights, gradients and optimizer
    activations: int  # kept of one micro-batch, without the matrix
    matrix: int  # the N x N matrices of attention, kept and at one moment; 0 where none is written
    freed: int  # blocks that are free and not given back to the system
    moment: int  # what the loss needs for a moment
    process: int = _PROCESS_BYTES  # the process itself
    data: int = 0  # the task's data that each process keeps in memory of its own
    reading: int = 0  # the most while that is read and made ready, before there is a model

    @property
    def training(self) -> int:
        """Bytes that training takes beside the process itself, once there is a model."""
        kept = self.activations + self.matrix + self.freed
        return self.data + self.state + kept + self.moment

    @property
    def total(self) -> int:
        """All of it, when it is most."""
        return self.process + max(self.reading, self.training)


_UNKNOWN = Need(0, 0, 0, 0, 0, process=0)  # of a script: nothing is refused


def vocabulary(data: Data) -> int:
    """Return the number of tokens that the tokenizer of a config has."""
    return data.vocabulary if data.tokenizer == "bpe" else VOCABULARY[data.tokenizer]


def parameters(config: RunConfig) -> int:
    """Count the weights of the model: V d + T d + L (12 d^2 + 13 d) + 2 d for a GPT-2.

    Without learned positions T d falls away; with fewer heads, keys and values have fewer columns;
    RMSNorm has no biases; QK-norm has two gains for each head's channels. A head of its own has V d
    more; without ``bias`` a layer has 9 d fewer. A BERT has token types too, a perceptron of any
    width, and a head of d^2 and a little more. A ViT has positions, and a
    matrix for its patches, taken to be of colour, and of 16 x 16 pixels for a task that has no
    option ``patch``. The head of a ViT is left out.
    """
    model = config.model
    width, kv_width = model.width, model.kv_width
    if model.family in ("bert", "vit"):
        inner = model.feed_forward or 4 * width
        layer = 4 * width**2 + 2 * width * inner + 9 * width + inner
        if model.family == "vit":
            patch = _CHANNELS * int(config.task.options.get("patch", _PATCH)) ** 2
            return (model.context + patch + 4) * width + model.layers * layer
        start = config.data.tokenizer == "bytes"  # which are no token to begin with
        tables = (vocabulary(config.data) + start + model.context + 4) * width
        return tables + model.layers * layer + width**2 + 4 * width
    norm = width if model.norm == "rms" else 2 * width
    attention = 2 * width * (width + model.bias) + 2 * kv_width * (width + model.bias)
    attention += 2 * model.head_width if model.qk_norm else 0
    perceptron = 8 * width**2 + 5 * width * model.bias
    positions = model.context * width if model.positions == "learned" else 0
    tokens = vocabulary(config.data) * width * (1 if model.tied else 2)
    return tokens + positions + model.layers * (attention + perceptron + 2 * norm) + norm


def need(config: RunConfig, device: str = "cpu") -> Need:
    """Return the estimate of the memory of its device for one run, by its config alone."""
    model, training = config.model, config.training
    tokens = training.batch * model.context
    precision = training.precision
    layer = _layer_bytes(config, device)
    pairs = training.batch * model.heads * model.context**2
    each, at_once = 2 * (_ELEMENT_BYTES[precision],)
    if device == "cuda" and precision != "float32":
        each, at_once = _GPU_HALF_BYTES
    times = 2 if model.dropout.attention else 1
    square = at_once * pairs
    kept = each * times * pairs if writes_matrix(config, device) else 0
    if training.checkpointing:
        inputs = _FLOAT_BYTES * model.width * tokens * model.layers
        activations, matrix = inputs + layer, kept
    else:
        activations, matrix = layer * model.layers, kept * model.layers
    logits = logits_bytes(config)
    activations += _LOGITS_KEPT * logits + _norm_bytes(config)
    moment = _LOGITS_AT_ONCE * logits
    if training.loss_tokens:
        head = _FLOAT_BYTES * model.width * vocabulary(config.data)
        chunk = math.ceil(logits * min(1.0, training.loss_tokens / tokens))
        activations += _FLOAT_BYTES * model.width * tokens + head - _LOGITS_KEPT * logits
        moment = (_LOGITS_KEPT + _LOGITS_AT_ONCE) * chunk + head
    matrix += _MATRICES_AT_ONCE * square if kept else 0
    slow = activations + (matrix if square < _GIVEN_BACK_BYTES else 0)
    return Need(
        state=4 * _FLOAT_BYTES * parameters(config),
        activations=activations,
        matrix=matrix,
        freed=slow // _KEPT_BY_ALLOCATOR,
        moment=moment,
    )


def logits_bytes(config: RunConfig) -> int:
    """Return the bytes of all logits of a micro-batch in float32, made at once or not."""
    tokens, share = config.training.batch * config.model.context, 1.0
    if config.model.family != "gpt2":  # logits are of the hidden tokens alone, or of classes
        share = float(config.task.options.get("probability", 0.0))
    return int(_FLOAT_BYTES * tokens * vocabulary(config.data) * share)


def gpu_need(config: RunConfig) -> Need:
    """Return the GPU memory that a process of a run needs."""
    if config.learning.external:
        return _UNKNOWN
    return need(config, "cuda")


def host_need(config: RunConfig, device: str = "cpu") -> Need:
    """Return the host memory that a process of a run needs.

    With a GPU that is its data, and the state, which goes through it with every checkpoint.
    """
    if config.learning.external:
        return _UNKNOWN
    found = need(config, device)
    if device == "cuda":
        found = Need(state=found.state, activations=0, matrix=0, freed=0, moment=0)
    data = config.learning.data_bytes(config)
    return replace(found, data=data.kept, reading=data.most)


def _layer_bytes(config: RunConfig, device: str) -> int:
    """Return the bytes that one layer keeps of a micro-batch, without the matrix."""
    model, training = config.model, config.training
    tokens, element = training.batch * model.context, _ELEMENT_BYTES[training.precision]
    kept = _LAYER_BYTES[training.precision] * model.width * tokens
    if model.dropout.residual:
        kept += 2 * _FLOAT_BYTES * model.width * tokens  # the noise of two places
    kept += 2 * _norm_bytes(config)
    turned = model.positions == "rotary"
    if config.attention.implementation != "plain":  # which repeats keys and values for its product
        kept -= 2 * element * (model.width - model.kv_width) * tokens
        if turned or model.qk_norm:  # heads come apart in memory, and the output is copied together
            kept += element * model.width * tokens
    if turned:
        kept += 2 * _FLOAT_BYTES * model.context * model.head_width  # cosines and sines, twice
    if model.qk_norm:  # in one pass with the rotation only what goes in is kept
        once = turned and device == "cpu"
        kept += (element if once else 2 * _FLOAT_BYTES) * (model.width + model.kv_width) * tokens
    return kept


def _norm_bytes(config: RunConfig) -> int:
    """Return the bytes that RMSNorm keeps more than LayerNorm: its normalised input."""
    model = config.model
    tokens = config.training.batch * model.context
    return _FLOAT_BYTES * model.width * tokens if model.norm == "rms" else 0


def writes_matrix(config: RunConfig, device: str = "cpu") -> bool:
    """Return whether the attention of a config writes its N x N matrix.

    On a CPU torch's fused kernel knows no dropout, and a mask that is given as a matrix costs as
    much. On a GPU it has both, and keeps no matrix of any head.
    """
    attention = config.attention
    if attention.implementation != "sdpa" or device == "cuda":
        return attention.implementation == "plain"
    other = attention.variant.name not in ("causal", "full") or config.data.packing == "documents"
    return config.model.dropout.attention > 0 or other


class NotEnoughMemoryError(TilewiseError):
    """A run would need more memory than there is."""


def available_bytes(device: str) -> int | None:
    """Memory of a device that new processes could take now; None where nobody knows."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return memory.available_bytes()


def room_for(
    runs: Sequence[RunSpec],
    jobs: int,
    available: int | None,
    needed: Callable[[RunConfig], Need] = host_need,
    processes: int = 1,
    kind: str = "memory",
) -> int:
    """Return how many runs may run at once, at least 1 and at most ``jobs``.

    ``needed`` is what one process of a run takes of the ``available`` bytes. Nothing is refused
    where nobody knows these (None).

    Raises:
        NotEnoughMemoryError: a single one needs more than there is.
    """
    if available is None or not runs:
        return jobs
    found = sorted(((needed(run.config), run) for run in runs), key=lambda each: -each[0].total)
    needs = [processes * each.total for each, _ in found]
    if needs[0] > available:
        raise NotEnoughMemoryError(_too_much(*found[0], available, processes, kind))
    while jobs > 1 and sum(needs[:jobs]) > available:
        jobs -= 1
    return jobs


def _too_much(wanted: Need, run: RunSpec, available: int, processes: int, kind: str) -> str:
    total = processes * wanted.total
    reads = wanted.reading > wanted.training
    parts = ("reading",) if reads else ("activations", "matrix", "state", "data")
    largest = max(parts, key=lambda part: getattr(wanted, part))
    words, fix = _REMEDIES[largest]
    size = processes * getattr(wanted, largest)
    several = f" in {processes} processes" if processes > 1 else ""
    return (
        f"arm {run.arm} of {run.experiment} needs about {_gb(total)} of {kind}{several}, and "
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
    "data": ("its data", "use less of it: a task.train_examples, or smaller files"),
    "reading": ("its data while it is read", "use smaller files"),
}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
