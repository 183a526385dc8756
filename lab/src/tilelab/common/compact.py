"""JSON for people: numbers with the digits that they are worth, lists of them on one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.errors import InvalidArgument

__all__ = ["compact_json", "read_json"]


def compact_json(values: Any, **lists: Sequence[Any]) -> str:
    """Return the text of JSON values, with a line's end.

    Numbers have six digits, which is more than any clock here is worth; JSON knows no infinity and
    no NaN, which become null.

    Args:
        values: what is written.
        lists: lists that a dictionary ends with, an item on a line.
    """
    text = json.dumps(_rounded(values), indent=1)
    text = _without_breaks(text)
    for name, items in lists.items():
        lines = ",\n".join(f"  {json.dumps(_rounded(each))}" for each in items)
        text = f'{text.removesuffix("}").rstrip()},\n "{name}": [\n{lines}\n ]\n}}'
    return text + "\n"


def _without_breaks(text: str) -> str:
    """Lists of numbers, which JSON's writer breaks, on one line."""
    return re.sub(
        r"\[\s+([^\[\]{}\"]*?)\s+\]",
        lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]",
        text,
    )


def read_json(path: Path, form: int, kind: str, argument: str = "--from") -> dict[str, Any]:
    """Return the record in the file that an argument names.

    Args:
        path: the file.
        form: the number of its format.
        kind: what it should be, in words.
        argument: of the command, for the error.

    Raises:
        InvalidArgument: there is none, or it is not of this format.
    """
    required = f"{kind}, format {form}"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(argument, f"{path} ({error})", required) from None
    if not isinstance(values, dict) or values.get("format") != form:
        raise InvalidArgument(argument, f"{path} of another kind", required)
    return values


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
