"""What a study is: typed, frozen and complete: its hash names everything that decides a result.

A ``Study`` holds experiments; an ``Experiment`` compares arms with a baseline over seeds; an
``Arm`` is the baseline with some values changed; a ``RunConfig`` is everything of one run but its
seed. Standard values are written out: a saved config says every number that was used.

Values are addressed by dotted paths, e.g. ``optimizer.lr`` or ``training.clip``; see ``change``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tilewise.errors import InvalidArgument
from tilewise.lab.study.choices.registry import Kind, nearest, resolve

__all__ = [
    "Arm",
    "Attention",
    "Budget",
    "Data",
    "Dropout",
    "Evaluation",
    "Experiment",
    "Model",
    "Optimizer",
    "RunConfig",
    "Schedule",
    "Study",
    "Sweep",
    "Training",
    "Variant",
    "change",
    "config_hash",
    "parse",
]

BASELINE = "baseline"  # the name of the arm that changes nothing


class Frozen(BaseModel):
    """A value: no field can be added, changed or given the wrong type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class Choice(Frozen):
    """A registered choice and all its options, e.g. ``{"name": "adamw", "lr": 0.003, ...}``.

    Options that are not given get the standard values of the registered function.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    kind: ClassVar[Kind]
    name: str

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "name" not in values:
            return values
        options = {key: value for key, value in values.items() if key != "name"}
        return {"name": values["name"], **resolve(cls.kind, values["name"], options)}

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, each with its value."""
        return dict(self.model_extra or {})


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


class Dropout(Frozen):
    """Probabilities of dropout in training, each in [0, 1)."""

    embedding: float = Field(0.0, ge=0, lt=1)
    attention: float = Field(0.0, ge=0, lt=1)
    residual: float = Field(0.0, ge=0, lt=1)


class Model(Frozen):
    """The shape of a GPT-2: ``lab/models/gpt2.py``. The vocabulary is the tokenizer's."""

    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    width: int = Field(128, ge=1)
    context: int = Field(256, ge=2)
    dropout: Dropout = Dropout()

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class Data(Frozen):
    """The text, its tokens, and how much of it is kept for evaluation.

    ``source`` is ``"stdlib"`` (the ``*.py`` of Python's standard library), ``"wikitext-2"``,
    ``"wikitext-103"``, or the path of a text file or a folder of them.
    """

    source: str = "stdlib"
    tokenizer: Literal["bytes", "gpt2"] = "bytes"
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
            raise ValueError("give either steps or tokens")
        return self


class Evaluation(Frozen):
    """The held-out loss, on the same windows in every run.

    ``every`` counts optimizer steps; the first weights and the last step are always evaluated.
    ``windows`` are spread evenly over the held-out text. A ``final_stride`` above 0 scores the
    whole held-out text after the last step instead: windows move on by that many tokens, and only
    the tokens that are new in a window count.
    """

    every: int = Field(25, ge=1)
    windows: int = Field(32, ge=1)
    final_stride: int = Field(0, ge=0)


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

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step learns from."""
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
        metric: ``"loss"`` in nats per token or ``"bits_per_byte"``, of the final held-out text.
        target: the loss (same unit) whose time and tokens are reported; None for none.
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
    metric: Literal["loss", "bits_per_byte"] = "bits_per_byte"
    target: float | None = Field(None, gt=0)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    power: float = Field(0.8, gt=0.5, lt=1)
    sweep: Sweep | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [self.baseline_name, *(arm.name for arm in self.arms)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two arms are called {twice[0]!r}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds}: give at least one, and each once")
        for arm in self.arms:
            change(self.baseline, arm.changes)
        if self.sweep is not None:
            self._check_sweep(self.sweep, names)
        return self

    def _check_sweep(self, sweep: Sweep, names: list[str]) -> None:
        if set(sweep.values) != set(names):
            raise ValueError(f"sweep.values: give candidates for exactly {', '.join(names)}")
        counts = {len(values) for values in sweep.values.values()}
        if len(counts) > 1 or 0 in counts:
            raise ValueError(
                "sweep.values: every arm gets the same number of candidates, 1 or more"
            )
        if not sweep.seeds or set(sweep.seeds) & set(self.seeds):
            raise ValueError("sweep.seeds: give at least one, and none of the experiment's own")
        change(self.baseline, {sweep.path: next(iter(sweep.values.values()))[0]})

    def config_of(self, arm: str) -> RunConfig:
        """The config of an arm (without what a sweep chooses)."""
        if arm == self.baseline_name:
            return self.baseline
        return change(self.baseline, next(each for each in self.arms if each.name == arm).changes)


class Study(Frozen):
    """A named set of experiments that one command runs and one report shows."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    question: str
    experiments: tuple[Experiment, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [each.name for each in self.experiments]
        if len(set(names)) < len(names):
            raise ValueError(f"two experiments have one name: {names}")
        return self


M = TypeVar("M", bound=Frozen)


def parse(kind: type[M], values: Mapping[str, Any]) -> M:
    """A value of that type from plain JSON values.

    Raises:
        InvalidArgument: an unknown key (the nearest is suggested), a wrong type or a wrong value.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, InvalidArgument):
            raise inner from None
        path = ".".join(map(str, first["loc"])) or kind.__name__
        came = repr(first["input"]) if first["loc"] else "values that do not fit together"
        raise InvalidArgument(path, came, first["msg"]) from None


def change(config: M, changes: Mapping[str, Any]) -> M:
    """The config with the values at some dotted paths replaced.

    A path may name a single value (``optimizer.lr``) or a whole part (``optimizer``, then the value
    is a mapping). Setting the ``name`` of a choice keeps those options that the new one has too.

    Args:
        config: what to start from; it is not changed.
        changes: dotted path -> new value, applied in order.

    Raises:
        InvalidArgument: an unknown path (the nearest is suggested), or a value that does not fit.
    """
    values = config.model_dump(mode="json")
    for path, value in changes.items():
        _set(values, path, value)
    return parse(type(config), values)


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    at: Any = values
    for depth, part in enumerate((*parents, last)):
        known = list(at) if isinstance(at, dict) else []
        # The options of a choice that is being changed are the new one's: its own check names them.
        if part not in known and not (depth == len(parents) and "name" in known and depth):
            where = ".".join((*parents, last)[:depth]) or "the config"
            required = f"a key of {where}: {', '.join(known) or 'none, it is a value'}"
            raise InvalidArgument(path, "an unknown key", required, nearest(part, known))
        if depth < len(parents):
            at = at[part]
    if last == "name" and parents and at.get("name") != value:
        kept = {key: at[key] for key in at if key != "name"}
        at.clear()
        at.update(_kept_options(parents[-1], value, kept))
    else:
        at[last] = value


def _kept_options(part: str, name: Any, options: dict[str, Any]) -> dict[str, Any]:
    kinds: dict[str, Kind] = {
        "optimizer": "optimizer",
        "schedule": "schedule",
        "variant": "variant",
    }
    defaults = resolve(kinds[part], name, {})
    return {"name": name, **{key: value for key, value in options.items() if key in defaults}}


def config_hash(config: Frozen) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the config's canonical JSON."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
