"""Recipes: functions that return a ``config.Study``, by name or from a user's own file."""

from tilelab.study.recipes.registry import Recipe, find, names, recipe

__all__ = ["Recipe", "find", "names", "recipe"]
