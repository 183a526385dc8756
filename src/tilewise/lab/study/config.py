"""What a study is: typed, frozen and complete: its hash names everything that decides a result.

A ``Study`` holds experiments; an ``Experiment`` compares arms with a baseline over seeds; an
``Arm`` is the baseline with some values changed; a ``RunConfig`` is everything of one run but its
seed. Standard values are written out: a saved config says every number that was used.

Values are addressed by dotted paths, e.g. ``optimizer.lr`` or ``training.clip``; see ``change``.
A value that does not fit raises pydantic's ``ValidationError`` from a constructor and
``tilewise.InvalidArgument`` from ``parse`` and ``change``.
"""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tilewise.errors import InvalidArgument
from tilewise.lab.study.choices.registry import find, nearest
from tilewise.lab.study.metrics import METRICS
from tilewise.lab.study.values import Choice, Frozen, added, change, config_hash, parse

__all__ = [
    "BASELINE",
    "Arm",
    "Attention",
    "Budget",
    "Choice",
    "Data",
    "Dropout",
    "Evaluation",
    "Experiment",
    "Frozen",
    "Model",
    "Optimizer",
    "RunConfig",
    "Schedule",
    "Study",
    "Sweep",
    "Task",
    "Training",
    "Variant",
    "change",
    "config_hash",
    "parse",
]

BASELINE = "baseline"  # the name of the arm that changes nothing


class Optimizer(Choice):
    """How weights follow gradients: a function in ``choices/optimizers.py``."""

    kind = "optimizer"
    name: str = "adamw"


class Schedule(Choice):
    """The learning rate over the run, as a share of ``optimizer.lr``: ``choices/schedules.py``."""

    kind = "schedule"
    name: str = "linear"


class Variant(Choice):
    """Who attends to whom, and how scores are changed: ``choices/variants.py``."""

    kind = "variant"
    name: str = "causal"


class Task(Choice):
    """What is learnt, from what, and how it is judged: ``choices/tasks.py`` and ``tasks/``."""

    kind = "task"
    name: str = "language-modelling"


class Dropout(Frozen):
    """Probabilities of dropout in training, each in [0, 1)."""

    embedding: float = Field(0.0, ge=0, lt=1)
    attention: float = Field(0.0, ge=0, lt=1)
    residual: float = Field(0.0, ge=0, lt=1)


class Model(Frozen):
    """A model of ``lab/models``. The vocabulary is the tokenizer's.

    ``family`` is ``"gpt2"`` (causal, ``gpt2.py``) or ``"bert"`` (an encoder, ``bert.py``); a task
    says which of them it takes. Weights begin as the seed draws them, or as those of
    ``checkpoint``: a folder in the Hugging Face layout, or ``package:NAME/FOLDER`` for one inside
    an installed Python package; what the checkpoint lacks (a task's head) is drawn. A BERT's
    perceptron has ``feed_forward`` channels, four times the width if nothing is said.

    With ``nudge`` every initial weight is moved to the next number, up or down: an arm that changes
    nothing else shows what rounding alone does to training.
    """

    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    width: int = Field(128, ge=1)
    context: int = Field(256, ge=2)
    dropout: Dropout = Dropout()
    nudge: bool = False
    family: Literal["gpt2", "bert"] = added("gpt2")
    checkpoint: str = added("")
    feed_forward: int | None = added(None, ge=1)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise InvalidArgument(
                "model.width", str(self.width), f"a multiple of heads={self.heads}"
            )
        return self


class Data(Frozen):
    """The data, its tokens, and how much of it is kept for evaluation.

    ``source`` is ``"stdlib"`` (the ``*.py`` of Python's standard library), ``"wikitext-2"`` or
    ``"wikitext-103"`` (with ``-raw`` for the form without ``<unk>``; looked for in the folder that
    ``TILEWISE_DATA`` names), or the path of a text file or a folder of them. Tasks with data sets
    of their own say what it means there. The tokenizer ``"wordpiece"`` is that of BERT (uncased).
    """

    source: str = "stdlib"
    tokenizer: Literal["bytes", "gpt2", "wordpiece"] = "bytes"
    size_cap_bytes: int = Field(16 * 1024 * 1024, ge=1)
    held_out: float = Field(0.05, gt=0, lt=1)


class Attention(Frozen):
    """Which attention runs, and which variant of it."""

    implementation: Literal["plain", "sdpa", "tilewise"] = "tilewise"
    variant: Variant = Variant(name="causal")


class Training(Frozen):
    """One optimizer step: ``batch * accumulation`` sequences."""

    batch: int = Field(8, ge=1)
    accumulation: int = Field(1, ge=1)
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0 for no clipping")
    z_loss: float = Field(0.0, ge=0, description="factor of the squared log of the partition sum")
    checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    compile: bool = Field(False, description="torch.compile")


class Budget(Frozen):
    """When a run ends: after so many optimizer steps, or tokens (rounded up to a step)."""

    steps: int | None = Field(None, ge=1)
    tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            came = "neither" if self.steps is None else "both"
            raise InvalidArgument("budget", came, "either steps or tokens")
        return self


class Evaluation(Frozen):
    """The held-out loss, on the same windows in every run.

    ``every`` counts optimizer steps; the first weights and the last step are always evaluated.
    ``windows`` are spread evenly over the held-out text. A ``final_stride`` above 0 scores the
    whole held-out text after the last step instead: windows move on by that many tokens, and only
    the tokens that are new in a window count. After the last step the model goes on with the
    beginning of the held-out text for ``sample_tokens`` tokens; 0 for none.
    """

    every: int = Field(25, ge=1)
    windows: int = Field(32, ge=1)
    final_stride: int = Field(0, ge=0)
    sample_tokens: int = Field(0, ge=0)


class RunConfig(Frozen):
    """Everything that decides a run, but its seed."""

    model: Model = Model()
    data: Data = Data()
    attention: Attention = Attention()
    optimizer: Optimizer = Optimizer(name="adamw")
    schedule: Schedule = Schedule(name="linear")
    training: Training = Training()
    budget: Budget = Budget(steps=300)
    evaluation: Evaluation = Evaluation()
    task: Task = added(Task(name="language-modelling"))

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        """What no run could do is refused before the first one, not after hours of others."""
        stride, context = self.evaluation.final_stride, self.model.context
        if stride > context:
            required = f"at most model.context={context}"
            raise InvalidArgument("evaluation.final_stride", str(stride), required)
        if self.attention.implementation == "sdpa" and self.attention.variant.name == "softcap":
            came, required = "softcap", "a variant that scaled_dot_product_attention has"
            fix = "Or set attention.implementation to tilewise or plain."
            raise InvalidArgument("attention.variant", came, required, fix)
        self.learning.check(self)
        return self

    @property
    def learning(self) -> Any:
        """The task with its options, an ``AbstractTask`` of ``tasks/task.py``."""
        return find("task", self.task.name).function(**self.task.options)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step learns from, if every sequence fills the context."""
        return self.training.batch * self.training.accumulation * self.model.context

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.budget.steps is not None:
            return self.budget.steps
        assert self.budget.tokens is not None
        return -(-self.budget.tokens // self.tokens_per_step)


class Arm(Frozen):
    """The baseline with some values changed.

    Args:
        name: unique in its experiment, made of letters, digits, ``.``, ``+``, ``=`` and ``-``.
        changes: dotted path -> new value.
        kind: ``"systems"`` for an arm that must not change what is learnt (another kernel): it has
            to pass the equivalence test on loss before its speed is reported.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+=-]*$")
    changes: dict[str, Any] = Field(default_factory=dict)
    kind: Literal["training", "systems"] = "training"

    @field_validator("changes")
    @classmethod
    def _plain(cls, changes: dict[str, Any]) -> dict[str, Any]:
        """The changes in JSON's types, so that an arm that was saved equals the one that was."""
        try:
            plain: dict[str, Any] = json.loads(json.dumps(changes, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidArgument("changes", repr(changes), f"values of JSON ({error})") from None
        return plain


class Sweep(Frozen):
    """Candidates of one value, tried for every arm with an equal budget before the final seeds.

    Args:
        path: what is swept.
        values: arm -> candidates; every arm, the baseline too, has equally many.
        seeds: of the trial runs; none of them is a seed of the experiment.
    """

    path: str = "optimizer.lr"
    values: dict[str, tuple[float, ...]]
    seeds: tuple[int, ...] = (1000,)


class Experiment(Frozen):
    """One question, and how it is decided.

    Args:
        name: unique in the study.
        question: in words.
        baseline: what the arms are compared with.
        baseline_name: what the report calls it.
        arms: the others.
        seeds: of every arm; the same seed gives every arm the same weights and batches.
        smallest_effect: the smallest difference of the final metric that matters, in its unit.
        metric: of the final held-out evaluation, one that the tasks of all arms have: e.g.
            ``"loss"`` in nats per token or ``"bits_per_byte"`` of a text (``metrics.py`` has all).
        target: the value (same unit) whose time and tokens are reported; None for none.
        confidence: of intervals and tests.
        power: of the number of seeds that an undecided arm still needs.
        sweep: candidates to try first; None where every arm says its own values.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    question: str
    baseline: RunConfig
    baseline_name: str = Field(BASELINE, pattern=r"^[A-Za-z0-9][A-Za-z0-9.+=-]*$")
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    smallest_effect: float = Field(gt=0)
    metric: str = "bits_per_byte"
    target: float | None = Field(None, gt=0)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    power: float = Field(0.8, gt=0.5, lt=1)
    sweep: Sweep | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [self.baseline_name, *(arm.name for arm in self.arms)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgument("arms", f"two called {twice[0]!r}", "a name for each arm")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InvalidArgument("seeds", str(self.seeds), "at least one, and each once")
        for name in names:
            self._check_metric(name, self.config_of(name).learning.metrics)
        if self.sweep is not None:
            self._check_sweep(self.sweep, names)
        return self

    def _check_metric(self, arm: str, known: tuple[str, ...]) -> None:
        if self.metric not in known:
            required = f"one of {', '.join(known)}, which the task of {arm} has"
            fix = nearest(self.metric, known if self.metric not in METRICS else ())
            raise InvalidArgument("metric", repr(self.metric), required, fix)

    def _check_sweep(self, sweep: Sweep, names: list[str]) -> None:
        came, required = ", ".join(sweep.values) or "none", f"candidates for {', '.join(names)}"
        if set(sweep.values) != set(names):
            raise InvalidArgument("sweep.values", came, required)
        counts = {len(values) for values in sweep.values.values()}
        if len(counts) > 1 or 0 in counts:
            required = "the same number of candidates for every arm, 1 or more"
            raise InvalidArgument("sweep.values", " and ".join(map(str, sorted(counts))), required)
        for arm, values in sweep.values.items():
            # Six digits name the folder of a trial.
            if len({f"{value:g}" for value in values}) < len(values):
                required = "candidates that differ in their first six digits"
                raise InvalidArgument(f"sweep.values.{arm}", str(values), required)
            for value in values:
                change(self.config_of(arm), {sweep.path: value})
        if not sweep.seeds or set(sweep.seeds) & set(self.seeds):
            required = "at least one, and none of the experiment's own"
            raise InvalidArgument("sweep.seeds", str(sweep.seeds), required)

    @property
    def arm_names(self) -> tuple[str, ...]:
        """All arms, the baseline first."""
        return (self.baseline_name, *(arm.name for arm in self.arms))

    def config_of(self, arm: str) -> RunConfig:
        """The config of an arm (without what a sweep chooses).

        Raises:
            KeyError: no arm of that name.
        """
        if arm == self.baseline_name:
            return self.baseline
        return change(self.baseline, {each.name: each for each in self.arms}[arm].changes)


class Study(Frozen):
    """A named set of experiments that one command runs and one report shows."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    question: str
    experiments: tuple[Experiment, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [each.name for each in self.experiments]
        if len(set(names)) < len(names):
            raise InvalidArgument("experiments", ", ".join(names), "a name for each experiment")
        # ``--set optimizer.lr=0.1`` has to mean one thing.
        taken = {*Experiment.model_fields, *RunConfig.model_fields, "experiments"} & set(names)
        if taken:
            required = "a name that is no key of an experiment or a run"
            raise InvalidArgument("experiments", repr(min(taken)), required)
        return self
