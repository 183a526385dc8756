"""Make docs/tour.ipynb from docs/tour.md: python scripts/notebook.py.

Each block of Python is a cell, and so is the text between two of them. There are no outputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tour.md"


def notebook(page: str) -> str:
    """Return a page in Markdown as a notebook, in version 4.5 of its format."""
    parts = re.split(r"^```python\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)
    cells = []
    for number, part in enumerate(parts):
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        cell["source"] = part.strip().splitlines(keepends=True)
        code = {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append(cell | (code if number % 2 else {"cell_type": "markdown"}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))
