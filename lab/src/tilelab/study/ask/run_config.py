"""The config of one run: everything that decides it, but its seed. See ``config.py``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tilelab.study.ask.values import Choice, Frozen, added, find, in_json
from tilewise.errors import InvalidArgument


class Optimizer(Choice):
    """The optimizer: a function in ``choices/optimizers.py``."""

    kind = "optimizer"
    name: str = "adamw"


class Schedule(Choice):
    """The learning rate over the run, as a share of ``optimizer.lr``: ``choices/schedules.py``."""

    kind = "schedule"
    name: str = "linear"


class Variant(Choice):
    """An attention mask and a change of scores: ``choices/variants.py``."""

    kind = "variant"
    name: str = "causal"


class Task(Choice):
    """The objective, the data and the metrics: a function in ``tasks/registered.py``."""

    kind = "task"
    name: str = "language-modelling"


class Dropout(Frozen):
    """Probabilities of dropout in training, each in [0, 1)."""

    embedding: float = Field(0.0, ge=0, lt=1)
    attention: float = Field(0.0, ge=0, lt=1)
    residual: float = Field(0.0, ge=0, lt=1)


class Model(Frozen):
    """A model of ``lab/models``. The vocabulary is the tokenizer's.

    ``family`` is ``"gpt2"`` (causal, ``gpt2.py``), ``"bert"`` (an encoder, ``bert.py``) or
    ``"vit"`` (an encoder of images, ``vit.py``); a task says which of them it takes. Weights begin
    as the seed draws them, or as those of ``checkpoint``: a folder in the Hugging Face layout, or
    ``package:NAME/FOLDER`` for one inside an installed Python package. The seed draws what the
    checkpoint lacks, such as a task's head, also where the checkpoint has one for other classes. An
    encoder's perceptron has ``feed_forward`` channels, four times the width if nothing is said.

    ``nudge`` moves every initial weight to the next number, up or down. An arm that changes nothing
    else shows what rounding alone does to training. ``kv_heads``, ``positions``, ``norm``,
    ``qk_norm``, ``tied``, ``bias`` and ``std`` are those of its ``Shape``: GPT-2's own unless they
    are changed.
    """

    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    width: int = Field(128, ge=1)
    context: int = Field(256, ge=2)
    dropout: Dropout = Dropout()
    nudge: bool = False
    kv_heads: int | None = added(None, ge=1)
    positions: Literal["learned", "rotary", "none"] = added("learned")
    norm: Literal["layer", "rms"] = added("layer")
    qk_norm: bool = added(False)
    family: Literal["gpt2", "bert", "vit"] = added("gpt2")
    checkpoint: str = added("")
    feed_forward: int | None = added(None, ge=1)
    tied: bool = added(True)
    bias: bool = added(True)
    std: float = added(0.02, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise InvalidArgument(
                "model.width", str(self.width), f"a multiple of heads={self.heads}"
            )
        if self.heads % (self.kv_heads or self.heads):
            required = f"a divisor of heads={self.heads}, or none for as many"
            raise InvalidArgument("model.kv_heads", str(self.kv_heads), required)
        if self.positions == "rotary" and self.head_width % 2:
            required = f"an even head width, and width / heads is {self.head_width}"
            raise InvalidArgument("model.positions", "rotary", required)
        return self

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Channels of all keys of a token, and of all values."""
        return (self.kv_heads or self.heads) * self.head_width


class Data(Frozen):
    """The data, its tokens, and how much of it is kept for evaluation.

    ``source`` is one of:

    * ``"stdlib"``: the ``*.py`` of Python's standard library;
    * ``"packages"``: the ``*.py`` of all packages in the folder that torch is installed in, but for
      files that are not UTF-8;
    * ``"wikitext-2"`` or ``"wikitext-103"``, with ``-raw`` for the form without ``<unk>``, in the
      folder that ``TILEWISE_DATA`` names;
    * the path of a text file, of a folder of them, or of a folder with a pattern of its files.

    Tasks with data sets of their own say what it means there. The tokenizer ``"wordpiece"`` is that
    of BERT (uncased), and ``"listops"`` that of the task of this name. ``"bpe"`` is a byte-pair
    encoding of ``vocabulary`` tokens, trained on the training text alone; with ``vocabulary_bytes``
    on about as much of it, in pieces from everywhere.

    ``packing`` says how documents (files of a folder, articles of WikiText) become rows in
    training: ``"stream"``, ``"documents"`` (queries see their own alone) or ``"padded"`` (a row
    each): ``data/order.py``. A budget counts rows of a whole context whatever is in them.

    ``tuning`` is the share of a text, or of the training examples of a classification, that only
    trials of a sweep are scored on. So the held-out part chooses nothing, and it does not depend on
    this: ``data/corpus.py``, ``tasks/classification.py``.
    """

    source: str = "stdlib"
    tokenizer: Literal["bytes", "gpt2", "bpe", "wordpiece", "listops"] = "bytes"
    size_cap_bytes: int = Field(16 * 1024 * 1024, ge=1)
    held_out: float = Field(0.05, gt=0, lt=1)
    packing: Literal["stream", "documents", "padded"] = added("stream")
    vocabulary: int = added(2048, ge=257, le=65536)
    tuning: float = added(0.0, ge=0, lt=1)
    vocabulary_bytes: int = added(0, ge=0)

    @model_validator(mode="after")
    def _leaves_a_text(self) -> Self:
        if self.held_out + self.tuning >= 1:
            required = f"less than 1 - data.held_out = {1 - self.held_out:g}"
            raise InvalidArgument("data.tuning", f"{self.tuning:g}", required)
        return self


class Attention(Frozen):
    """The attention implementation, and its variant.

    ``fault`` computes something wrong on purpose, as a positive control: a comparison of kernels
    that cannot tell it from the right result could not have seen such a bug. ``"scale"`` is a
    softmax scale that is 1 % too large. ``"mask"`` is a mask that is off by one: a causal query
    does not see its own token (the first one does), and in an encoder nobody but the first token
    sees the first key.
    """

    implementation: Literal["plain", "sdpa", "tilewise"] = "tilewise"
    variant: Variant = Variant(name="causal")
    fault: Literal["none", "scale", "mask"] = added("none")


class LengthWarmup(Frozen):
    """Short sequences first; 0 ``steps`` for none.

    Over these steps the length grows evenly from ``start`` to the model's context, rounded down to
    a length that divides the context. A step learns from the same tokens as without it, with its
    rows cut into pieces of that length. Steps, tokens and the budget stay what they are.
    Evaluations have the whole context always.
    """

    start: int = Field(32, ge=1)
    steps: int = Field(0, ge=0)


class Training(Frozen):
    """One optimizer step: ``batch * accumulation`` sequences.

    With ``loss_tokens`` a language model makes the logits of so many tokens at a time, and takes
    their loss and gradients before the next ones: ``tasks/language.py``. Sums are in another order.
    """

    batch: int = Field(8, ge=1)
    accumulation: int = Field(1, ge=1)
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0 for no clipping")
    z_loss: float = Field(0.0, ge=0, description="factor of the squared log of the partition sum")
    checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    compile: bool = Field(False, description="torch.compile")
    length_warmup: LengthWarmup = added(LengthWarmup())
    loss_tokens: int = added(0, ge=0)


class Budget(Frozen):
    """The length of a run: optimizer steps, tokens, or epochs (the last two rounded up to a step).

    An epoch is all training examples of a task that knows their number: GLUE's.
    """

    steps: int | None = Field(None, ge=1)
    tokens: int | None = Field(None, ge=1)
    epochs: float | None = added(None, gt=0)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            came = " and ".join(given) or "nothing"
            raise InvalidArgument("budget", came, "one of steps, tokens and epochs")
        return self


class Evaluation(Frozen):
    """The held-out loss, on the same windows in every run.

    ``every`` counts optimizer steps; the first weights and the last step are always evaluated.
    ``windows`` are spread evenly over the held-out text; a task that learns no text evaluates all
    of its held-out examples, and refuses another number. A ``final_stride`` above 0 scores the
    whole held-out text after the last step instead. Windows then move on by that many tokens, and
    only the tokens that are new in a window count. After the last step the model goes on with the
    beginning of the held-out text for ``sample_tokens`` tokens; 0 for none.

    Windows are of the text as a stream, whatever the packing in training. With ``documents`` every
    query sees its own document alone, in all arms alike, and the first token of a document is not
    scored. ``attention_windows`` windows (or first examples) give the recorded statistics of the
    attention layers, which changes no result; 0 for none.

    ``text`` is the text, or are the examples, that are scored: ``"held-out"``, or those of
    ``data.tuning``. A trial of a sweep sets it by itself.
    """

    every: int = Field(25, ge=1)
    windows: int = Field(32, ge=1)
    final_stride: int = Field(0, ge=0)
    sample_tokens: int = Field(0, ge=0)
    documents: bool = added(False)
    attention_windows: int = added(4, ge=0)
    text: Literal["held-out", "tuning"] = added("held-out")


class RunConfig(Frozen):
    """Everything that decides a run, but its seed.

    ``choice`` has the choices that a script is given (the task ``script``); other tasks have none.
    """

    model: Model = Model()
    data: Data = Data()
    attention: Attention = Attention()
    optimizer: Optimizer = Optimizer(name="adamw")
    schedule: Schedule = Schedule(name="linear")
    training: Training = Training()
    budget: Budget = Budget(steps=300)
    evaluation: Evaluation = Evaluation()
    task: Task = added(Task(name="language-modelling"))
    choice: dict[str, Any] = added({})

    @field_validator("choice")
    @classmethod
    def _plain(cls, choice: dict[str, Any]) -> dict[str, Any]:
        return in_json("choice", choice)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        """Refuse what no run could do, before the first one and not after hours of others."""
        stride, context = self.evaluation.final_stride, self.model.context
        if stride > context:
            raise self.unfit("evaluation.final_stride", f"at most model.context={context}")
        warmup = self.training.length_warmup
        if warmup.steps and context % warmup.start:
            required = f"a divisor of model.context={context}"
            raise self.unfit("training.length_warmup.start", required)
        if self.attention.implementation == "sdpa" and self.attention.variant.name == "softcap":
            required = "a variant that scaled_dot_product_attention has"
            fix = "Or set attention.implementation to tilewise or plain."
            raise self.unfit("attention.variant", required, fix)
        if self.evaluation.text == "tuning" and not self.data.tuning:
            required = "held-out, or a data.tuning above 0"
            raise InvalidArgument("evaluation.text", "tuning", required)
        self.learning.check(self)
        return self

    def unfit(self, path: str, required: str, fix: str = "") -> InvalidArgument:
        """Return the complaint about the value at a dotted path."""
        return InvalidArgument(path, written(attrgetter(path)(self)), required, fix)

    @property
    def learning(self) -> Any:
        """The task with its options, an ``AbstractTask`` of ``tasks/task.py``."""
        return find("task", self.task.name).function(**self.task.options)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step learns from, if every sequence fills the context.

        0 for a script, which reports its own.
        """
        if self.learning.external:
            return 0
        return self.training.batch * self.training.accumulation * self.model.context

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.budget.steps is not None:
            return self.budget.steps
        if self.budget.epochs is not None:
            # Rounded first: 0.1 * 30 is not above 3.
            examples: float = round(self.budget.epochs * self.learning.epoch(self), 6)
            return math.ceil(examples / (self.training.batch * self.training.accumulation))
        assert self.budget.tokens is not None
        return -(-self.budget.tokens // self.tokens_per_step)

    def length_at(self, step: int) -> int:
        """Return tokens of a row in an optimizer step, 0 for the first: see ``LengthWarmup``."""
        warmup, context = self.training.length_warmup, self.model.context
        if step >= warmup.steps:
            return context
        reached = warmup.start + (context - warmup.start) * step // warmup.steps
        return next(each for each in range(reached, 0, -1) if context % each == 0)

    @property
    def lengths(self) -> dict[int, int]:
        """The number of steps of the whole run that have rows of each length."""
        warm = min(self.training.length_warmup.steps, self.steps)
        counts = Counter(self.length_at(step) for step in range(warm))
        counts[self.model.context] += self.steps - warm
        return {length: count for length, count in sorted(counts.items()) if count}


def written(value: object) -> str:
    """Return a value of a config as a user writes it; a choice by its name."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Choice):
        return value.name
    return repr(value) if isinstance(value, str) else str(value)


OF_SCRIPT = ("task", "choice", "budget")  # the parts of a config that a script uses


def parts_used(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts of a config in JSON's types that its run uses; a script has few."""
    if values.get("task", {}).get("name") != "script":
        return values
    return {part: values[part] for part in OF_SCRIPT}
