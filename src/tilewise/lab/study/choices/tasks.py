"""Tasks by name: what a run learns. Each is a room of ``lab/study/tasks``; its options are here.

To add one: write the room (``tasks/task.py`` says what it has to do), and a function here that
makes it from its options: an ``AbstractTask``, which cannot be named here, as rooms import config
and config this module, through the registry. Rooms are imported when they are asked for: configs
know all names, and a study of texts loads nothing of the others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tilewise.lab.study.choices.registry import register

__all__ = ["glue", "images", "language_modelling", "masked_language_modelling"]

GlueName = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
Pooling = Literal["first", "mean"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, lt=1)]


@register("task")
def language_modelling() -> Any:
    """Predict the next token of a text, with a GPT-2."""
    from tilewise.lab.study.tasks.language import LanguageModelling

    return LanguageModelling()


@register("task")
def glue(
    *,
    dataset: GlueName = "cola",
    train_examples: CountOrZero = 0,
    pooling: Pooling = "first",
) -> Any:
    """A data set of GLUE, with a BERT: from a checkpoint, or from scratch."""
    from tilewise.lab.study.tasks.glue import GlueTask

    return GlueTask(dataset, train_examples, pooling)


@register("task")
def images(*, patch: Count = 4, pooling: Pooling = "first", train_examples: CountOrZero = 0) -> Any:
    """Classes of images, with a ViT: CIFAR-10, Pathfinder, arrays of one's own, the Hub's."""
    from tilewise.lab.study.tasks.images import ImageClassification

    return ImageClassification(patch, pooling, train_examples)


@register("task")
def masked_language_modelling(*, probability: Probability = 0.15) -> Any:
    """Guess the tokens of a text that were masked, with a BERT."""
    from tilewise.lab.study.tasks.masked import MaskedLanguageModelling

    return MaskedLanguageModelling(probability)
