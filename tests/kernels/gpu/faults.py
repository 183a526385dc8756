"""Plant a fault in a copy of a module of kernels: a change of its text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A change of the text of a kernel that breaks its protocol."""

    name: str
    before: str
    after: str


def moved(line: str, beyond: str, name: str) -> Fault:
    """A line that comes before the one it should follow."""
    return Fault(name, f"{beyond}\n{line}\n", f"{line}\n{beyond}\n")


def without(line: str, name: str) -> Fault:
    return Fault(name, f"{line}\n", "\n")


def with_fault(module: Any, fault: Fault, folder: Path) -> Any:
    """A copy of a module that has a fault."""
    text = Path(module.__file__).read_text()
    assert text.count(fault.before) == 1, f"{fault.name}: {text.count(fault.before)} such lines"
    path = folder / f"{Path(module.__file__).stem}_with_fault.py"
    path.write_text(text.replace(fault.before, fault.after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
