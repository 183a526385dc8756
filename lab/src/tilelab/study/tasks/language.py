"""Language modelling: predict the next token of a text. The first task, and the standard one.

The held-out loss is in nats per token, bits per byte and, of WikiText, per original word.

**In chunks.** Logits of T tokens and a vocabulary of V take 4 T V bytes in float32, and some four
times that with their gradient: 17 GB for 32,768 tokens of each. ``tilewise.linear_cross_entropy``
has the logits of a few tokens at a time.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise
from tilelab.models.gpt2 import GPT2
from tilelab.study.ask.config import RunConfig, Training
from tilelab.study.ask.metrics import Floor
from tilelab.study.data import order
from tilelab.study.data.floors import floors
from tilelab.study.data.tokens import Tokens, prepare
from tilelab.study.records.events import Sample
from tilelab.study.tasks.families import gpt2_of
from tilelab.study.tasks.scores import evaluating, look
from tilelab.study.tasks.task import NO_TARGET, AbstractTask, Batch, Examination, Held, dtype_of
from tilewise.errors import InvalidArgument


class Features(NamedTuple):
    """What a head multiplies, and the matrix that it multiplies with."""

    hidden: Tensor  # [..., width]
    weight: Tensor  # [V, width]


class Headless(nn.Module):
    """A GPT-2 up to its head: ``chunked_losses`` does the rest."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Features:
        """Return the features of the inputs of ``GPT2.forward``."""
        return Features(self.model.features(*inputs), self.model.unembedding)


def chunked_losses(
    features: Features, targets: Tensor, training: Training
) -> tuple[Tensor, Tensor]:
    """Return what ``losses`` returns of the head's logits, to rounding.

    Logits are in the run's precision, the loss in float32, and the gradient of the head is added up
    in its own type.

    Args:
        features: of a micro-batch.
        targets: [...] as those of ``losses``; at least one that counts.
        training: ``loss_tokens`` is the number of tokens of a chunk.
    """
    hidden = features.hidden
    if hidden.dtype != torch.float64:  # as ``losses`` lets it be
        hidden = hidden.to(dtype_of(training.precision))
    objective, plain = tilewise.linear_cross_entropy(
        hidden,
        features.weight,
        targets,
        ignore_index=NO_TARGET,
        label_smoothing=training.label_smoothing,
        z_loss=training.z_loss,
        return_nll=True,
        block_tokens=training.loss_tokens,
    )
    return objective, plain


_LOGITS_BYTES = 1 << 28  # the most that the logits of one forward pass may take, in float32
_MOST_ROWS = 8
_WATCHED_ROWS = 8


class _Batches:
    """Rows of the training text: ``data/order.py``."""

    def __init__(self, config: RunConfig, data: Tokens, seed: int) -> None:
        self._rows = order.RunRows(config, data, seed)

    def at(self, step: int) -> list[Batch]:
        return [
            Batch(each.model_inputs, each.targets, each.learnt, each.learnt)
            for each in self._rows.at(step)
        ]


class _Examination(Examination):
    """Windows of the held-out text, all of it at the end where the config has a stride."""

    def __init__(self, config: RunConfig, data: Tokens) -> None:
        evaluation, context = config.evaluation, config.model.context
        data = data.scored_on(evaluation.text)
        self._config, self._data = config, data
        begins = data.documents.held_out if evaluation.documents else None

        def spread(windows: int) -> order.Windows:
            return order.evaluation_windows(data.held_out, context, windows, begins)

        self._windows = self._whole = spread(evaluation.windows)
        if evaluation.final_stride:
            self._whole = order.strided(data.held_out, context, evaluation.final_stride, begins)
        count = evaluation.attention_windows
        self._watched = spread(count) if count else None

    def held_out(self, model: nn.Module, whole: bool, autocast: torch.dtype | None) -> Held:
        score = evaluate(model, self._whole if whole else self._windows, self._data, autocast)
        softmaxes = None
        if self._watched is not None:
            parts = self._watched.parts(_WATCHED_ROWS)
            with evaluating(model, autocast) as device:
                calls = ([each.to(device) for each in part.model_inputs] for part in parts)
                softmaxes = look(model, calls)
        per_word = word_perplexity(score, self._data)
        return Held(score.loss, score.bits_per_byte, per_word, softmaxes=softmaxes)

    def sample(
        self, model: nn.Module, count: int, seed: int, autocast: torch.dtype | None
    ) -> Sample:
        """Let the model go on with the held-out text; arms draw the same random numbers."""
        assert isinstance(model, GPT2)
        decode = self._data.decode
        prompt = self._data.held_out[: min(PROMPT_TOKENS, self._config.model.context)].tolist()
        written = sample(model, prompt, count, seed, autocast)
        return Sample(printable(decode(prompt)), printable(decode(written)))


class LanguageModelling(AbstractTask):
    """The next token of a text, with a GPT-2; see ``AbstractTask``."""

    families = ("gpt2",)
    tokenizers = ("bytes", "gpt2", "bpe")
    metrics = ("bits_per_byte", "loss")
    writes = True
    learns_text = True
    packs = True
    causal = True
    unit = "token"

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if config.attention.variant.name == "full":
            required = "a causal variant: a token must not see the one that it predicts"
            raise config.unfit("attention.variant", required)
        if config.training.loss_tokens and config.training.precision == "fp16":
            came = f"{config.training.loss_tokens} with training.precision=fp16"
            fix = "Its gradients are taken before fp16's are scaled: take bf16."
            raise InvalidArgument("training.loss_tokens", came, "0 with fp16", fix)

    def prepare(self, config: RunConfig, cache: Path) -> Tokens:
        """Return the tokens of the text."""
        return prepare(config.data, cache)

    def batches(self, config: RunConfig, data: Tokens, seed: int) -> _Batches:
        """Windows of the training text."""
        return _Batches(config, data, seed)

    def model(self, config: RunConfig, data: Tokens, seed: int, device: torch.device) -> GPT2:
        """Return a GPT-2; the head is part of it."""
        return gpt2_of(config, data.vocabulary, seed, device)

    def learner(self, model: nn.Module, training: Training) -> nn.Module:
        """Return the model, without its head where the loss is taken in chunks."""
        if not training.loss_tokens:
            return model
        assert isinstance(model, GPT2)
        return Headless(model)

    def losses(self, output: Any, targets: Tensor, training: Training) -> tuple[Tensor, Tensor]:
        """See ``AbstractTask``."""
        if isinstance(output, Features):
            return chunked_losses(output, targets, training)
        return super().losses(output, targets, training)

    def examination(self, config: RunConfig, data: Tokens) -> _Examination:
        """Windows of the held-out text."""
        return _Examination(config, data)

    def floors(self, config: RunConfig, data: Tokens, seed: int, cache: Path) -> tuple[Floor, ...]:
        """Return the floors of ``data/floors.py``, of WikiText with their word perplexity."""
        size, tokens = data.held_out_bytes, len(data.held_out)
        return tuple(
            replace(
                each,
                word_perplexity=word_perplexity(
                    Score(each.value * math.log(2) * size, tokens, size), data
                ),
            )
            for each in floors(data, order.RunRows(config, data, seed).seen(), cache)
        )

    def looked_up(self, model: nn.Module) -> int:
        """Count the positions, and the token embedding unless it is the head, which multiplies."""
        assert isinstance(model, GPT2)
        return super().looked_up(model) - (model.tokens.weight.numel() if model.head is None else 0)

    def attended(self, config: RunConfig, data: Tokens) -> float:
        """Return tokens of the row, or of the document's piece in it, that a token is in."""
        return order.attended(config, data)

    def evaluated(self, config: RunConfig, data: Tokens, whole: bool) -> int:
        """Windows, those of the final stride after the last step."""
        evaluation = config.evaluation
        if whole and evaluation.final_stride:
            scored = data.scored_on(evaluation.text).held_out
            return math.ceil(len(scored) / evaluation.final_stride)
        return evaluation.windows


PROMPT_TOKENS = 64
_UNSEEN = ("Cc", "Cf", "Co", "Cn")  # controls, marks of direction, and what is no character


def sample(
    model: GPT2, prompt: Sequence[int], count: int, seed: int, autocast: torch.dtype | None = None
) -> list[int]:
    """Return ``count`` tokens that the model puts after a prompt, drawn from its distribution.

    Its mode and torch's random state are left as they were. Models that agree write the same: the
    same numbers are drawn whatever the model is.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    tokens = list(prompt)
    with evaluating(model) as device:
        for draw in draws:
            seen = torch.tensor([tokens[-model.shape.context :]], device=device)
            with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
                logits = model(seen)
            sums = logits[0, -1].double().softmax(0).cumsum(0)
            # The first token whose sum is above: a draw in [0, 1) of the last sum, which rounds.
            index = torch.searchsorted(sums, draw * sums[-1], right=True)
            tokens.append(int(index.clamp(max=len(sums) - 1)))
    return tokens[len(prompt) :]


def printable(text: str) -> str:
    """Return the text with U+FFFD for every character that is not seen, but newlines and tabs."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(each) in _UNSEEN and each not in "\n\t"
        else each
        for each in text
    )


class Score(NamedTuple):
    """The loss of a model on the targets that count."""

    nats: float  # sum of cross-entropies
    tokens: int
    bytes: int  # of the text that they stand for

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text: comparable between tokenizers."""
        return self.nats / self.bytes / math.log(2)


def evaluate(
    model: nn.Module, windows: order.Windows, tokens: Tokens, autocast: torch.dtype | None = None
) -> Score:
    """Score a model, without dropout; its mode and the random state are left as they were.

    The same windows go through the model in the same groups whatever is compared, and
    cross-entropies are taken in float32 and added in float64.
    """
    byte_count = torch.from_numpy(tokens.token_bytes)
    rows = _LOGITS_BYTES // (4 * windows.context * tokens.vocabulary)
    nats, count, size = 0.0, 0, 0
    with evaluating(model, autocast) as device:
        for part in windows.parts(min(max(rows, 1), _MOST_ROWS)):
            logits = model(*(each.to(device) for each in part.model_inputs))
            targets = part.targets.to(device).flatten()
            losses = functional.cross_entropy(
                logits.flatten(0, 1).float(), targets, reduction="none"
            )
            counted = part.targets.flatten() != order.IGNORED
            nats += losses[counted.to(device)].double().sum().item()
            count += int(counted.sum())
            size += int(byte_count[part.targets.flatten()[counted]].sum())
    return Score(nats, count, size)


def word_perplexity(score: Score, tokens: Tokens) -> float | None:
    """exp(nats per original word), None for a text whose original words are not known.

    ``exp(nats / score.bytes * bytes / (words - 1))`` with the bytes of the held-out text after its
    first token and its ``words`` before it was detokenised. For the full strided pass, where
    ``score.bytes == bytes``, that is ``exp(nats / (words - 1))``: neither the first token nor the
    first word is predicted. For a sample of windows it is the same, estimated from that sample.

    Source: the adjusted perplexity of Megatron-LM (Shoeybi et al. 2019).
    """
    if tokens.held_out_words is None:
        return None
    bytes_after_first = tokens.held_out_bytes - int(tokens.token_bytes[tokens.held_out[0]])
    return _exp(score.nats / score.bytes * bytes_after_first / (tokens.held_out_words - 1))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
