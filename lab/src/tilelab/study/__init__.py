"""The study: trains arms that differ in one choice, and says which choices are worth having.

The steps, in order:

1. ``recipes/`` says what is asked: a ``config.Study`` (typed, frozen, hashed).
2. ``conduct/`` turns it into runs and works through them, each in a process of its own.
3. ``train/`` is one run: the model (``lab/models``), the text (``data/``), the choices
   (``choices/``), the measurements; it leaves ``records``.
4. ``verdict/`` reads records and decides; ``report/`` shows what was decided, ``browse/`` any run.
"""

from tilelab.study.ask.values import provide

__all__: list[str] = []

provide("optimizer", "tilelab.study.choices.optimizers")
provide("schedule", "tilelab.study.choices.schedules")
provide("variant", "tilelab.study.choices.variants")
provide("task", "tilelab.study.tasks.registered")
