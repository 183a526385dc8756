"""The trackers by name; each is imported on demand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from tilelab.study.ask.registry import nearest
from tilelab.study.recipes.registry import load_file
from tilelab.study.track.tracker import AbstractTracker
from tilewise.errors import InvalidArgument

__all__ = ["TRACKERS", "trackers"]

# name -> its module and class here, and what to install; it is made with a folder of its own.
TRACKERS = {
    "mlflow": ("mlflow", "Mlflow"),
    "tensorboard": ("tensorboard", "TensorBoard"),
}


def trackers(names: Sequence[str], folder: Path) -> dict[str, AbstractTracker]:
    """Return the trackers of these names, each once.

    Args:
        names: of ``TRACKERS``, or ``file.py:function`` with a function that takes a folder and
            returns a tracker; the file is the user's own and is run.
        folder: of the study; each tracker has a folder in it, which it need not use.

    Raises:
        InvalidArgument: no such tracker, or its package is not installed.
    """
    return {name: _made(name, folder) for name in dict.fromkeys(names)}


def _made(name: str, folder: Path) -> AbstractTracker:
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        found = _from_file(Path(file), function)(folder / function)
        if not isinstance(found, AbstractTracker):
            came = f"a {type(found).__name__} from {name}"
            raise InvalidArgument("--track", came, "a tilelab.study.track tracker")
        return found
    if name not in TRACKERS:
        required = f"one of {', '.join(TRACKERS)}, or file.py:function"
        raise InvalidArgument("--track", repr(name), required, nearest(name, TRACKERS))
    module, kind = TRACKERS[name]
    try:
        found = getattr(import_module(f"tilelab.study.track.{module}"), kind)(folder / name)
    except ImportError as error:
        came, fix = f"{name}, and it cannot be imported ({error})", "pip install 'tilewise[track]'"
        raise InvalidArgument("--track", came, f"a Python with the package {name}", fix) from None
    assert isinstance(found, AbstractTracker)
    return found


def _from_file(file: Path, function: str) -> Callable[[Path], object]:
    required = "a Python file and a function in it"
    if not file.is_file():
        raise InvalidArgument("--track", f"{file}, which is no file", required)
    found = getattr(load_file(file), function, None)
    if not (inspect.isfunction(found) or inspect.isclass(found)):
        raise InvalidArgument("--track", f"{file}:{function}, which is no function", required)
    made: Callable[[Path], object] = found
    return made
