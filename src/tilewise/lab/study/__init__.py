"""The study: trains arms that differ in one choice, and says which choices are worth having.

What happens, in order:

1. ``recipes/`` says what is asked: a ``config.Study`` (typed, frozen, hashed).
2. ``conduct/`` turns it into runs and works through them, each in a process of its own.
3. ``train/`` is one run: the model (``lab/models``), the text (``data/``), the choices
   (``choices/``), the measurements; it leaves ``records``.
4. ``verdict/`` reads records and decides; ``report/`` shows what was decided, ``browse/`` any run.
"""
