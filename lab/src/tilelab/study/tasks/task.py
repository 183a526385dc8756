"""The base of tasks: everything of a run that depends on what is learnt.

The rest of the study (trainer, session, verdicts, reports) asks a task and knows none by name. A
task decides

* which configs it can run at all (``check``), before any run starts;
* its data (``prepare``): read, tokenized and hashed once, then the same for every arm and seed;
* the batches, as a function of seed and step alone (``batches``): paired seeds see the same ones;
* the model with its head (``model``), whose weights depend on config and seed alone;
* what a step minimises (``losses``) and what a held-out evaluation says (``examination``), with the
  names of its metrics (``metrics``; ``study/ask/metrics.py`` knows their units and directions);
* what an evening's forecast and a FLOP count need to know (the rest).

To add a task, subclass ``AbstractTask`` in a file of this folder, and add a function that makes it
to ``registered.py``. The function's keyword-only parameters are the task's options in a config
(``task.name``, ``task.folder``, ...). A task that classifies sequences should start from
``Classification`` (``classification.py``). It only says where examples come from, how many classes
there are and which metrics count. ``Classification`` has batches without padding, the BERT with its
head, the objective and the evaluation. A model of another shape is a new file in ``tilelab/models``
and a new value of ``config.Model.family``; its inputs are whatever ``Batch.inputs`` holds.

An option that only some tasks know belongs to the task, never to ``RunConfig``: what is not in a
config's task cannot be set wrongly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilelab.study.ask.config import Data, Evaluation, Model, RunConfig, Training
from tilelab.study.ask.metrics import Floor
from tilelab.study.ask.run_config import written
from tilelab.study.choices.variants import ENCODER
from tilelab.study.records.events import LayerSoftmax, Sample
from tilewise.errors import InvalidArgument


class Prepared(Protocol):
    """Data that is ready: whatever a task needs of it, and what every record says."""

    @property
    def sha256(self) -> str:
        """The hash of everything that decides the training data, and of its split."""

    def as_json(self) -> dict[str, Any]:
        """Return the facts on the data for records and reports: name, sizes, ``sha256``."""

    def __str__(self) -> str:
        """Return the data in a line, for the console."""


class DataBytes(NamedTuple):
    """Memory that data takes in each process of a run."""

    kept: int = 0  # while the run trains
    most: int = 0  # while it is read and made ready


class Batch(NamedTuple):
    """A micro-batch."""

    inputs: tuple[Any, ...]  # what the model is called with; each has ``.to(device)``
    targets: Tensor  # what ``losses`` compares its output with
    counted: int  # targets of the mean: the share of a micro-batch in its step
    tokens: int  # that are learnt from, padding not counted

    def to(self, device: torch.device) -> Batch:
        """Return the same on a device."""
        inputs = tuple(each.to(device) for each in self.inputs)
        return self._replace(inputs=inputs, targets=self.targets.to(device))


# Of an optimizer step (0: the first) its micro-batches, equal in every process.
Batches = Callable[[int], Sequence[Batch]]


class Held(NamedTuple):
    """The results of a held-out evaluation; see ``records.Evaluation``."""

    loss: float  # of what is minimised, without smoothing and the like
    bits_per_byte: float | None = None  # these two of language models
    word_perplexity: float | None = None
    metrics: dict[str, float | None] = {}  # noqa: RUF012  never changed
    softmaxes: list[LayerSoftmax] | None = None


class Examination(ABC):
    """The held-out data of a run, and how a model is examined on it."""

    @abstractmethod
    def held_out(self, model: nn.Module, whole: bool, autocast: torch.dtype | None) -> Held:
        """Evaluate, in eval mode and without a trace: mode and random state stay as they are.

        ``whole`` is after the last step, where a task may look at more. Without ``autocast`` the
        dtype of matrix products is that of the weights.
        """

    def sample(
        self, model: nn.Module, count: int, seed: int, autocast: torch.dtype | None
    ) -> Sample:
        """Return a text that the model writes, for a task that can write."""
        raise NotImplementedError("check() refuses evaluation.sample_tokens for this task")


# Settings that only some tasks, tokenizers and models know, and what they are for the others.
_OF_ROWS = (
    "data.packing",
    "evaluation.documents",
    "training.length_warmup.steps",
    "training.loss_tokens",
)
_OF_BPE = ("data.vocabulary", "data.vocabulary_bytes")
_OF_GPT2 = tuple(
    f"model.{name}" for name in ("kv_heads", "positions", "norm", "qk_norm", "tied", "bias", "std")
)
_STANDARD = SimpleNamespace(
    model=Model(), data=Data(), training=Training(), evaluation=Evaluation()
)


def data_key(config: RunConfig) -> str:
    """Return a key of everything that a task's data depends on: runs with the same key share it."""
    data = config.data.model_dump_json(exclude={"packing"})  # how the same tokens become rows
    return f"{config.task.model_dump_json()} {data}"


class AbstractTask(ABC):
    """The objective, the data and the metrics of a run.

    Instances are cheap and have no state: data goes in and out.

    Args of all methods: ``config`` is of the run; ``data`` is what ``prepare`` gave.
    """

    families: ClassVar[tuple[str, ...]]  # of models that it takes
    tokenizers: ClassVar[tuple[str, ...]]  # of config.Data that it takes
    fine_tunes: ClassVar[bool] = False  # whether it takes model.checkpoint
    writes: ClassVar[bool] = False  # whether its models can go on with a text
    unit: ClassVar[str] = "example"  # what a batch is counted in, in words
    learns_text: ClassVar[bool] = False  # data is one text: windows, strides, shares held out
    tunes: ClassVar[bool] = False  # it takes data.tuning, as those that learn texts do
    packs: ClassVar[bool] = False  # it knows of documents and of rows that grow (data/order.py)
    sized_by_data: ClassVar[bool] = False  # model.context is what its data has, and no other
    causal: ClassVar[bool] = False  # whether c = 6 means something (``train/costs.py``)
    external: ClassVar[bool] = False  # it is somebody's own training: ``tasks/script.py``

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Names of ``study/ask/metrics.py`` that its evaluations have, the usual one first."""

    def check(self, config: RunConfig) -> None:
        """Refuse what no run of this task could do; subclasses call this one too.

        Raises:
            InvalidArgument: with the path of the value, what is required and how to fix it.
        """
        task = config.task.name
        if config.choice:
            came = ", ".join(config.choice)
            raise InvalidArgument("choice", came, f"none: task {task} is not a script")
        for path, known in (("model.family", self.families), ("data.tokenizer", self.tokenizers)):
            if attrgetter(path)(config) not in known:
                raise config.unfit(path, f"{' or '.join(known)} for task {task}")
        if config.model.checkpoint and not self.fine_tunes:
            raise config.unfit("model.checkpoint", f"none: {task} begins from scratch")
        self._check_factors(config)
        if config.model.family == "bert" and config.attention.variant.name not in ENCODER:
            required = f"one of {', '.join(ENCODER)}: an encoder's tokens look both ways"
            raise config.unfit("attention.variant", required)
        evaluation = config.evaluation
        if evaluation.sample_tokens and not self.writes:
            raise config.unfit("evaluation.sample_tokens", f"0: {task} writes no text")
        if evaluation.final_stride and not self.learns_text:
            raise config.unfit("evaluation.final_stride", f"0 for task {task}")
        standard = Evaluation().windows
        if evaluation.windows != standard and not self.learns_text:
            required = f"{standard}, which says nothing here: {task} is evaluated on all examples"
            raise config.unfit("evaluation.windows", required, "It counts windows of a text.")
        if config.budget.tokens is not None and not self.learns_text:
            came = f"{config.budget.tokens} tokens"
            required = f"budget.steps: task {task} counts examples"
            raise InvalidArgument("budget", came, required)
        if config.budget.epochs is not None and self.epoch(config) is None:
            required = f"budget.steps: {task} does not know the number of its examples beforehand"
            raise InvalidArgument("budget", f"{config.budget.epochs:g} epochs", required)

    def _check_factors(self, config: RunConfig) -> None:
        """Nothing that a task or a model does not know is set without an effect."""
        of_task: tuple[str, ...] = () if self.packs else _OF_ROWS
        of_task += () if self.learns_text or self.tunes else ("data.tuning",)
        gpt2, tokenizer = config.model.family == "gpt2", config.data.tokenizer
        foreign = {
            f"task {config.task.name}": of_task,
            f"family {config.model.family}": ("model.feed_forward",) if gpt2 else _OF_GPT2,
            f"tokenizer {tokenizer}": _OF_BPE if gpt2 and tokenizer != "bpe" else (),
        }
        for who, paths in foreign.items():
            for path in paths:
                standard = attrgetter(path)(_STANDARD)
                if attrgetter(path)(config) != standard:
                    raise config.unfit(path, f"{written(standard)} for {who}")

    @abstractmethod
    def prepare(self, config: RunConfig, cache: Path) -> Any:
        """Return the data, a ``Prepared``.

        It depends on ``config.task`` and ``config.data`` alone, so that runs share it. ``cache`` is
        a folder for what takes long to make; it may be used or not.

        Raises:
            InvalidArgument: it is not there; the message says how to get it.
        """

    def epoch(self, config: RunConfig) -> int | None:
        """Return the examples of an epoch; None for a task that has to read its data for it."""
        return None

    def data_bytes(self, config: RunConfig) -> DataBytes:
        """Estimate the bytes that ``prepare`` will take, from the config and the sizes of files.

        Nothing for data that is mapped from a file (tokens of a text are), or whose size nobody
        knows before it is read.
        """
        return DataBytes()

    @abstractmethod
    def batches(self, config: RunConfig, data: Any, seed: int) -> Batches:
        """Return the training batches, at random access."""

    @abstractmethod
    def model(self, config: RunConfig, data: Any, seed: int, device: torch.device) -> nn.Module:
        """Return the model with its head; ``model(*batch.inputs)`` gives its logits or values.

        Its attention layers are modules with an attribute ``implementation``: the guard sees those.
        """

    def learner(self, model: nn.Module, training: Training) -> nn.Module:
        """Return the module that a training step calls: its result is for ``losses``."""
        return model

    def losses(self, output: Any, targets: Tensor, training: Training) -> tuple[Tensor, Tensor]:
        """Return the objective with its graph and the plain loss without, means over targets.

        ``output`` is what ``learner`` gave. Here the cross-entropy of classes, of their logits.
        """
        smoothing, z_loss = training.label_smoothing, training.z_loss
        return losses(output, targets, label_smoothing=smoothing, z_loss=z_loss)

    @abstractmethod
    def examination(self, config: RunConfig, data: Any) -> Examination:
        """Return the held-out side."""

    def floors(self, config: RunConfig, data: Any, seed: int, cache: Path) -> tuple[Floor, ...]:
        """Return what something simpler than a model scores on the held-out data; here nothing.

        ``config`` and ``seed`` are of the run that says which data is seen. ``cache`` is a folder
        for what takes long to compute.
        """
        return ()

    def looked_up(self, model: nn.Module) -> int:
        """Count the model's numbers that are looked up and not multiplied (``train/costs.py``).

        Here those of all embeddings: a head that is one of them sees few tokens.
        """
        tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
        return sum(each.weight.numel() for each in tables)

    def attended(self, config: RunConfig, data: Any) -> float:
        """Keys that a token meets, on average, without a mask: the context, or less of it."""
        return float(config.model.context)

    @abstractmethod
    def evaluated(self, config: RunConfig, data: Any, whole: bool) -> int:
        """Sequences of an evaluation, for forecasts; ``whole`` as in ``Examination.held_out``."""


NO_TARGET = -100
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of matrix products in a precision of ``config.Training``."""
    return _DTYPES[precision]


def losses(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the objective and the plain cross-entropy without a graph, means over tokens in nats.

    With log-probabilities l and the partition sum Z of a token's logits, V tokens in all::

        objective = mean(-(1 - label_smoothing) l[target] - label_smoothing sum(l) / V
                         + z_loss log(Z)^2)

    Computed in float32 whatever the logits' type (float64 stays).

    Args:
        logits: [..., V].
        targets: [...]; -100 for a token that has none and does not count.
        label_smoothing: share of the target that goes to all tokens evenly, in [0, 1).
        z_loss: factor of log(Z)^2, which keeps logits from drifting.

    Sources: Szegedy et al. (2016), section 7; z-loss: Chowdhery et al., PaLM (2022), section 5.
    """
    rows, targets = logits.flatten(0, -2), targets.flatten()
    rows = rows if rows.element_size() >= 4 else rows.float()
    if not label_smoothing and not z_loss:
        plain = functional.cross_entropy(rows, targets, ignore_index=NO_TARGET)
        return plain, plain.detach()
    counted = targets != NO_TARGET
    if not bool(counted.all()):
        rows, targets = rows[counted], targets[counted]
    log_probabilities = rows.log_softmax(dim=-1)
    plain = functional.nll_loss(log_probabilities, targets)
    even = -log_probabilities.mean()
    objective = (1.0 - label_smoothing) * plain + label_smoothing * even
    if z_loss:
        objective = objective + z_loss * rows.logsumexp(dim=-1).square().mean()
    return objective, plain.detach()
