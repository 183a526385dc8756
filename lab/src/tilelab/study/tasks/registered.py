"""Tasks by name: what a run learns. The modules beside this one have them, and it their options.

They are not in the package itself, where a function and its module would have one name.

To add one, write the module (``tasks/task.py`` says what it has to do) and a function here that
makes it from its options. The function returns an ``AbstractTask``, which cannot be named here:
task modules import config, and config imports this module through values. Task modules are
imported on demand: configs know all names, and a study of texts loads nothing of the others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tilelab.study.ask.values import ADDED, Count, CountOrZero, register
from tilewise.errors import InvalidArgument

GlueName = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
Pooling = Literal["first", "mean"]
GluePooling = Literal["first", "mean", "pairs"]
Classes = Annotated[int, Field(ge=2)]
_SHORTEST = 8
OwnMetric = Annotated[str, Field(pattern=r"^(lower|higher):\S+$")]
Probability = Annotated[float, Field(gt=0, lt=1)]


@register("task")
def language_modelling() -> Any:
    """Predict the next token of a text, with a GPT-2."""
    from tilelab.study.tasks.language import LanguageModelling

    return LanguageModelling()


@register("task")
def glue(
    *,
    dataset: GlueName = "cola",
    train_examples: CountOrZero = 0,
    pooling: GluePooling = "first",
) -> Any:
    """A data set of GLUE, with a BERT: from a checkpoint, or from scratch."""
    from tilelab.study.tasks.glue import GlueTask

    return GlueTask(dataset, train_examples, pooling)


@register("task")
def images(*, patch: Count = 4, pooling: Pooling = "first", train_examples: CountOrZero = 0) -> Any:
    """Classes of images, with a ViT: CIFAR-10, Pathfinder, arrays of one's own, the Hub's."""
    from tilelab.study.tasks.images import ImageClassification

    return ImageClassification(patch, pooling, train_examples)


@register("task")
def listops(
    *,
    form: Literal["lra", "nyu"] = "lra",
    longest: CountOrZero = 0,
    pooling: Pooling = "first",
) -> Any:
    """The value of a nested expression, with a BERT: the Long Range Arena's, or shorter ones."""
    from tilelab.study.tasks.long import ListOps

    return ListOps(form, longest, pooling)


@register("task")
def masked_language_modelling(*, probability: Probability = 0.15) -> Any:
    """Guess the tokens of a text that were masked, with a BERT."""
    from tilelab.study.tasks.language import MaskedLanguageModelling

    return MaskedLanguageModelling(probability)


@register("task")
def script(
    *,
    command: str = "",
    function: str = "",
    metric: OwnMetric = "lower:loss",
    lines: str = "",
    files: Annotated[tuple[str, ...], ADDED] = (),
    sha256: str = "",
) -> Any:
    """A training of your own: a command or a function, which reports a metric."""
    from tilelab.study.tasks.script import Script

    return Script(command, function, metric, lines, files, sha256)


def _room(passage: int, **_: Any) -> None:
    """A passage has room for special tokens and one of its own."""
    if 0 < passage < _SHORTEST:
        raise InvalidArgument("task.passage", str(passage), f"{_SHORTEST} or more, or 0 for none")


@register("task", _room)
def text_classification(
    *, classes: Classes = 2, passage: CountOrZero = 0, pooling: Pooling = "first"
) -> Any:
    """The label of a text from its bytes or word pieces, with a BERT: IMDb's reviews, or others."""
    from tilelab.study.tasks.long import TextClassification

    return TextClassification(classes, passage, pooling)


@register("task", _room)
def documents(
    *,
    label: Literal["era", "party"] = "era",
    split: Literal["addresses", "presidents"] = "addresses",
    passage: CountOrZero = 0,
    pooling: Pooling = "first",
) -> Any:
    """When, or by which party, a long address to the Congress was given, with a BERT."""
    from tilelab.study.tasks.long import Documents

    return Documents(label, split, passage, pooling)
