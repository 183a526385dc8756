"""Language modelling: predict the next token of a text, or guess tokens of it that were hidden.

**Next token.** The first task, and the standard one. The held-out loss is in nats per token, bits
per byte and, of WikiText, per original word. Logits of T tokens and a vocabulary of V take 4 T V
bytes in float32, and some four times that with their gradient: 17 GB for 32,768 tokens of each.
``tilewise.linear_cross_entropy`` has the logits of a few tokens at a time.

**Hidden tokens.** These are all the rules. Text is tokenized by WordPiece and cut into windows of
context - 2 tokens (``data/order.py``). A window stands between ``[CLS]`` and ``[SEP]``. Every token
of a window is chosen by itself with the task's ``probability``; if none is chosen in a micro-batch,
its first one is. Among the chosen tokens, 80 % become ``[MASK]``, 10 % any ordinary token (drawn
from all words and pieces, evenly), and 10 % stay. The loss is over the chosen ones. In training
they are drawn anew for every step, from the run's seed; in evaluations they are the same in every
run. There is no second objective (next sentence).

Source of the latter: Devlin et al., BERT (2019), section 3.1 and appendix A.1.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import tilewise
from tilelab.models.bert import BERT, Head
from tilelab.models.gpt2 import GPT2
from tilelab.models.layers import Packed, pack
from tilelab.stats.paired import exp
from tilelab.study.ask.config import RunConfig, Training
from tilelab.study.ask.metrics import Floor
from tilelab.study.data import order
from tilelab.study.data.corpus import data_folder
from tilelab.study.data.floors import floors
from tilelab.study.data.tokenizers import WordPiece, wordpiece
from tilelab.study.data.tokens import Tokens, prepare
from tilelab.study.records.events import Sample
from tilelab.study.tasks.families import bert_of, gpt2_of
from tilelab.study.tasks.scores import evaluating, look
from tilelab.study.tasks.task import (
    NO_TARGET,
    AbstractTask,
    Batch,
    Batches,
    Examination,
    Held,
    dtype_of,
)
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

    Targets [...] are those of ``losses``; at least one counts. A chunk has
    ``training.loss_tokens``.
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


class _Text(AbstractTask):
    learns_text = True
    unit = "token"

    def prepare(self, config: RunConfig, cache: Path) -> Tokens:
        return prepare(config.data, cache)


class LanguageModelling(_Text):
    """The next token of a text, with a GPT-2; see ``AbstractTask``."""

    families = ("gpt2",)
    tokenizers = ("bytes", "gpt2", "bpe")
    metrics = ("bits_per_byte", "loss")
    writes = True
    packs = True
    causal = True

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

    def batches(self, config: RunConfig, data: Tokens, seed: int) -> Batches:
        """Rows of the training text: ``data/order.py``."""
        rows = order.RunRows(config, data, seed)
        return lambda step: [
            Batch(each.model_inputs, each.targets, each.learnt, each.learnt)
            for each in rows.at(step)
        ]

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
    with evaluating(model, autocast) as device:
        for draw in draws:
            seen = torch.tensor([tokens[-model.shape.context :]], device=device)
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
    return exp(score.nats / score.bytes * bytes_after_first / (tokens.held_out_words - 1))


_MASKED, _OTHER = 0.8, 0.1  # of the chosen tokens; the rest stays
_MASK_STREAM = 0x6D61736B  # the draws are none of the windows' order
_EVALUATION_SEED = 0
_SPECIAL = 2  # tokens beside a window
_SHORTEST = 8


class Masked(NamedTuple):
    """Windows with hidden tokens."""

    tokens: NDArray[np.int64]  # int64 [B, S], as the model sees them
    wanted: NDArray[np.int64]  # int64 [P], the chosen places, counted through all windows
    targets: NDArray[np.int64]  # int64 [P], what was there


def mask(
    tokens: NDArray[np.int64], pieces: WordPiece, probability: float, seed: int, index: int
) -> Masked:
    """Choose and hide tokens of windows, int64 [B, S]."""
    count = tokens.size
    random = order.drawn(seed ^ _MASK_STREAM, index, 3 * count).reshape(3, count)
    shares = (random[:2] >> np.uint64(11)) * 2.0**-53
    chosen = shares[0] < probability
    if not chosen.any():
        chosen[0] = True
    flat = tokens.flatten()
    ordinary = np.array(pieces.ordinary, np.int64)
    others = ordinary[(random[2] % np.uint64(len(ordinary))).astype(np.int64)]
    hidden = np.where(shares[1] < _MASKED, pieces.mask, flat)
    hidden = np.where((shares[1] >= _MASKED) & (shares[1] < _MASKED + _OTHER), others, hidden)
    wanted = np.flatnonzero(chosen)
    return Masked(np.where(chosen, hidden, flat).reshape(tokens.shape), wanted, flat[wanted])


def _packed(masked: Masked, pieces: WordPiece) -> tuple[Packed, Tensor, Tensor]:
    """Return the windows between their special tokens, and where the chosen tokens are then."""
    rows = [[pieces.first, *row, pieces.border] for row in masked.tokens.tolist()]
    window = masked.tokens.shape[1]
    wanted = masked.wanted + _SPECIAL * (masked.wanted // window) + 1
    return pack(rows), torch.from_numpy(wanted), torch.from_numpy(masked.targets)


class _MaskedExamination(Examination):
    """Windows of the held-out text, with the same tokens hidden in every run."""

    def __init__(
        self, config: RunConfig, data: Tokens, probability: float, pieces: WordPiece
    ) -> None:
        data = data.scored_on(config.evaluation.text)
        window = config.model.context - _SPECIAL
        windows = config.evaluation.windows
        self._windows = order.evaluation_windows(data.held_out, window, windows)
        count = config.evaluation.attention_windows
        self._watched: Tensor | None = None
        if count:
            watched = order.evaluation_windows(data.held_out, window, count)
            self._watched = next(watched.parts(count)).tokens
        self._probability, self._pieces = probability, pieces

    def held_out(self, model: nn.Module, whole: bool, autocast: torch.dtype | None) -> Held:
        nats, right, count = 0.0, 0, 0
        with evaluating(model, autocast) as device:
            for index, part in enumerate(self._windows.parts(_MOST_ROWS)):
                packed, wanted, targets = self._masked(part.tokens, index)
                logits = model(packed.to(device), wanted.to(device)).float()
                targets = targets.to(device)
                found = functional.cross_entropy(logits, targets, reduction="none")
                nats += found.double().sum().item()
                right += int((logits.argmax(-1) == targets).sum())
                count += len(targets)
            softmaxes = None
            if self._watched is not None:
                packed, wanted, _ = self._masked(self._watched, 0)
                softmaxes = look(model, [(packed.to(device), wanted.to(device))])
        return Held(nats / count, metrics={"accuracy": right / count}, softmaxes=softmaxes)

    def _masked(self, inputs: Tensor, index: int) -> tuple[Packed, Tensor, Tensor]:
        tokens = inputs.numpy()
        masked = mask(tokens, self._pieces, self._probability, _EVALUATION_SEED, index)
        return _packed(masked, self._pieces)


class MaskedLanguageModelling(_Text):
    """The hidden tokens of a text, with a BERT; see the top of this file and ``AbstractTask``."""

    families = ("bert",)
    tokenizers = ("wordpiece",)
    metrics = ("loss", "accuracy")
    fine_tunes = True

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if config.model.context < _SHORTEST:
            raise config.unfit("model.context", f"{_SHORTEST} or more")
        if config.evaluation.final_stride:
            required = "0: an encoder's windows are not strided"
            raise config.unfit("evaluation.final_stride", required)
        if config.training.compile:
            required = "false: the number of hidden tokens changes from batch to batch"
            raise config.unfit("training.compile", required)

    def batches(self, config: RunConfig, data: Tokens, seed: int) -> Batches:
        """Masked windows of the training text."""
        training, pieces = config.training, wordpiece(data_folder())
        window, accumulation = config.model.context - _SPECIAL, training.accumulation
        windows = order.Stream(data, window, training.batch, accumulation, seed)

        def at(step: int) -> list[Batch]:
            found = []
            for part, rows in enumerate(windows.at(step)):
                index = step * accumulation + part
                masked = mask(rows.tokens.numpy(), pieces, self.probability, seed, index)
                packed, wanted, targets = _packed(masked, pieces)
                found.append(Batch((packed, wanted), targets, len(targets), len(packed.tokens)))
            return found

        return at

    def model(self, config: RunConfig, data: Tokens, seed: int, device: torch.device) -> BERT:
        """Return a BERT with a head of tokens, tied to their embedding."""
        return bert_of(config, data.vocabulary, Head("masked"), seed, device)

    def examination(self, config: RunConfig, data: Tokens) -> _MaskedExamination:
        """Masked windows of the held-out text."""
        return _MaskedExamination(config, data, self.probability, wordpiece(data_folder()))

    def evaluated(self, config: RunConfig, data: Tokens, whole: bool) -> int:
        """Windows."""
        return config.evaluation.windows
