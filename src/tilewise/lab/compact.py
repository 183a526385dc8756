"""JSON for people: numbers with the digits that they are worth, lists of them on one line."""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["compact_json"]


def compact_json(values: Any) -> str:
    """The text of JSON values, with a line's end.

    Numbers have six digits, which is more than any clock here is worth; JSON knows no infinity and
    no NaN, which become null.
    """
    text = json.dumps(_rounded(values), indent=1)
    one_line = re.sub(
        r"\[\s+([^\[\]{}\"]*?)\s+\]",
        lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]",
        text,
    )
    return one_line + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
