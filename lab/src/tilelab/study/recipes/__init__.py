"""Recipes: functions that return a ``config.Study``, by name or from a user's own file.

Adding one to the package is writing one function in a module here and naming that module below::

    @recipe
    def laptop(*, seeds: int = 3) -> Study:
        ...

A function in a file of one's own needs no more than its name: ``find("my_study.py:laptop")``.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from pydantic import ValidationError

from tilelab.study.ask.config import Study
from tilelab.study.ask.values import as_invalid_argument, nearest
from tilewise.errors import InvalidArgument

__all__ = ["Recipe", "find", "names", "recipe"]

_RECIPES: dict[str, Recipe] = {}
# Where the recipes of the package are; imported when one is first asked for.
_MODULES = ("laptop", "ladder", "gpt2", "bert", "gpu")


class Recipe(NamedTuple):
    """A function that returns a study."""

    name: str  # the function's, with dashes; of a user's own, with its file
    function: Callable[..., Study]  # takes keywords only
    options: Mapping[str, Any]  # what it takes, with standard values
    summary: str  # the first line of its docstring

    def study(self, **options: Any) -> Study:
        """Return the study, with some options given.

        Raises:
            InvalidArgument: an unknown option (the nearest is suggested), a value of another type
                than the standard one or that does not fit, or a function that returns something
                else.
        """
        for key, value in options.items():
            if key not in self.options:
                required = f"one of {', '.join(self.options) or 'none: it has no options'}"
                raise InvalidArgument(key, repr(value), required, nearest(key, self.options))
            _check_type(key, value, self.options[key])
        try:
            made = self.function(**options)
        except ValidationError as error:
            raise as_invalid_argument(error) from error
        if not isinstance(made, Study):
            came = f"a {type(made).__name__} from the function"
            raise InvalidArgument(self.name, came, "a tilelab.study.ask.config.Study")
        return made


def recipe(function: Callable[..., Study]) -> Callable[..., Study]:
    """Decorator that makes a function of the package a recipe, under its own name."""
    name = function.__name__.replace("_", "-")
    _RECIPES[name] = _described(name, function)
    return function


def names() -> tuple[str, ...]:
    """Return the names of the package's recipes, in the order of their modules."""
    for module in _MODULES:
        import_module(f"tilelab.study.recipes.{module}")
    return tuple(_RECIPES)


def find(name: str) -> Recipe:
    """Find the recipe of that name, or ``function`` of the file in ``file.py:function``.

    The file is the user's own and is run. ``file.py`` alone is its function ``study``.

    Raises:
        InvalidArgument: no such recipe (the nearest is suggested), file or function, or a function
            that has arguments without standard values.
    """
    file, colon, function = (f"{name}:study" if name.endswith(".py") else name).rpartition(":")
    if colon and file.endswith(".py"):
        return _described(name, function_of("recipe", Path(file), function))
    known = names()
    if name not in _RECIPES:
        required = f"one of {', '.join(known)}, or file.py:function"
        raise InvalidArgument("recipe", repr(name), required, nearest(name, known))
    return _RECIPES[name]


def _check_type(key: str, value: object, default: object) -> None:
    kind = type(default)
    # A bool is an int in Python, and a whole number stands for a float.
    fits = type(value) is kind or (kind is float and type(value) is int)
    if kind in (bool, int, float, str) and not fits:
        raise InvalidArgument(key, repr(value), f"a value of type {kind.__name__}")


def function_of(
    argument: str, file: Path, name: str, fits: Callable[[object], bool] = inspect.isfunction
) -> Callable[..., Any]:
    """Return a function, or what fits else, of a user's own file, which is run.

    Raises:
        InvalidArgument: of that argument: no such file, or none in it.
    """
    if not file.is_file():
        required = "a Python file and a function in it"
        raise InvalidArgument(argument, f"{file}, which is no file", required)
    module = _loaded(file)
    found: dict[str, Callable[..., Any]]
    found = {key: each for key, each in vars(module).items() if fits(each)}
    if name not in found:
        known = [key for key, each in found.items() if each.__module__ == module.__name__]
        required = f"a function of that file: {', '.join(known) or 'it has none'}"
        came = f"{file}:{name}, which is no function"
        raise InvalidArgument(argument, came, required, nearest(name, known))
    return found[name]


def _loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_tilewise_recipe_{file.stem}", file)
    assert spec is not None  # a name that ends in .py always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:  # of the file, or of one that it imports
        where, line = error.filename or str(file), (error.text or "").strip()
        came = f"{where}, line {error.lineno}: {error.msg}" + (f" ({line})" if line else "")
        raise InvalidArgument(str(file), came, "a file that Python can read") from None
    except SystemExit:
        came, required = "a program: it ended when it was imported", "a file with a function"
        fix = "A study of it has its command: docs/studies.md, 'Your own training'."
        raise InvalidArgument(str(file), came, required, fix) from None
    return module


def _described(name: str, function: Callable[..., Study]) -> Recipe:
    parameters = inspect.signature(function).parameters.values()
    without = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    if without:
        came = f"arguments without a standard value: {', '.join(without)}"
        raise InvalidArgument(name, came, "standard values for all arguments")
    options = {each.name: each.default for each in parameters}
    summary = (function.__doc__ or "").strip().partition("\n")[0]
    return Recipe(name, function, MappingProxyType(options), summary)
