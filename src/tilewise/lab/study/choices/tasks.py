"""Tasks by name: what a run learns. Each is a room of ``lab/study/tasks``; its options are here.

To add one: write the room (``tasks/task.py`` says what it has to do), and a function here that
makes it from its options: an ``AbstractTask``, which cannot be named here, as rooms import config
and config this module, through the registry. Rooms are imported when they are asked for: configs
know all names, and a study of texts loads nothing of the others.
"""

from __future__ import annotations

from typing import Any

from tilewise.lab.study.choices.registry import register

__all__ = ["language_modelling"]


@register("task")
def language_modelling() -> Any:
    """Predict the next token of a text, with a GPT-2."""
    from tilewise.lab.study.tasks.language import LanguageModelling

    return LanguageModelling()
