"""The report: a page and its Markdown twin, made from a study's config and records alone.

Where its parts are made:

- the page as a whole, every chart and table in its order: ``content`` (``_experiment``,
  ``_figures``);
- the sentence above the table of arms: ``verdicts.meaning``;
- the reason beside an arm: ``tilelab/stats/decide.py``;
- the rows of the table of arms: ``verdicts.row_of``, its intervals: ``verdicts.forest_of``; its
  drawing: ``templates/parts.html``, ``report.md``;
- the tables below it: ``tables.evidence_tables``, columns by ``verdict/measures.py``;
- the charts of curves and paired differences: ``lines``;
- the charts of memory, target, survival and cost: ``costs``;
- the charts of effects and sweeps: ``tuning``;
- the charts of attention's layers: ``attention``.

matplotlib draws the charts. ``common/svg.finish`` turns each into an ``<svg>``.
"""

from __future__ import annotations

import json
from pathlib import Path

from tilelab.common.files import write_atomically
from tilelab.study.report.content import Evidence, all_speeds, gather, page_of
from tilelab.study.report.page import html, markdown
from tilewise.commands.visible import visible

__all__ = ["Evidence", "all_speeds", "gather", "write"]


def write(evidence: Evidence) -> tuple[Path, Path]:
    """Write the page, its Markdown twin and ``verdict.json``; return the paths of the first two."""
    folder, page = evidence.folder, page_of(evidence)
    paths = folder / "report.html", folder / "report.md"
    for path, text in zip(paths, (visible(html(page)), visible(markdown(page))), strict=True):
        write_atomically(path, text)
    verdict = json.dumps(evidence.verdict.as_json(), indent=1)
    write_atomically(folder / "verdict.json", verdict + "\n")
    return paths
