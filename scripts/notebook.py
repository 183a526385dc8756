"""Make docs/tour.ipynb from docs/tour.md: python scripts/notebook.py.

Each block of Python is a cell, and so is the text between two of them. There are no outputs. The
first cell is not of the page: it installs tilewise and tilelab where one of them is missing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# Nothing is published yet, so it takes a clone. The notebook lies in the clone's folder docs/.
INSTALL = """\
# Only where tilewise is missing. On Colab, upload a clone first, and put its folder into CLONE.
CLONE = ".."

import importlib.util

if not all(importlib.util.find_spec(name) for name in ("tilewise", "tilelab")):
    %pip install --quiet {CLONE} {CLONE}/lab
"""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "tour.md"


def notebook(page: str) -> str:
    """Return a page in Markdown as a notebook, in version 4.5 of its format."""
    parts = re.split(r"^```python\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)
    code = {"cell_type": "code", "execution_count": None, "outputs": []}
    cells = [_cell("install", INSTALL) | code]
    cells[0]["metadata"] = {"tags": ["install"]}
    for number, part in enumerate(parts):
        cell = _cell(f"cell-{number}", part)
        cells.append(cell | (code if number % 2 else {"cell_type": "markdown"}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    colab = {"name": PAGE.with_suffix(".ipynb").name, "provenance": [], "toc_visible": True}
    metadata = {"colab": colab, "kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _cell(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "metadata": {}, "source": text.strip().splitlines(keepends=True)}


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))
