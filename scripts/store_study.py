#!/usr/bin/env python3
"""Store a finished study small: scripts/store_study.py STUDY_FOLDER benchmarks/studies/NAME.

Copies ``study.json`` and ``report.md`` (without ``--out FOLDER`` in their command, a place of one
machine), ``floors.json`` where there is one, and every record; the records go into one
``records.tar.gz`` whose bytes depend on them alone. Records of more than 300 steps are condensed:
a line stands for 32 steps. Checkpoints, the HTML page and the index stay behind. To have the page
again, or to go on with the study on another machine: unpack the archive beside ``study.json``, in
the folder that the study would have.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import tarfile
from pathlib import Path

from tilelab.study.records.events import condensed

MOST_STEPS = 300  # of a record that is stored as it is
FOLDER = re.compile(r""" --out[ =]('[^']*'|\S+)""")  # as a shell quotes it


def store(study: Path, target: Path) -> int:
    """Write the stored form of a study's folder into another; return the bytes that it takes."""
    target.mkdir(parents=True, exist_ok=True)
    told = json.loads((study / "study.json").read_text())
    command, told["command"] = told["command"], FOLDER.sub("", told["command"])
    (target / "study.json").write_text(json.dumps(told, indent=1) + "\n")
    report = (study / "report.md").read_text().replace(command, told["command"])
    (target / "report.md").write_text(report)
    floors = study / "floors.json"
    if floors.exists():
        (target / floors.name).write_bytes(floors.read_bytes())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for record in sorted(study.glob("runs/**/record.jsonl")):
            member = tarfile.TarInfo(record.relative_to(study).as_posix())
            data = record.read_bytes()
            if data.count(b'"event":"step"') > MOST_STEPS:
                data = condensed(record)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (target / "records.tar.gz").write_bytes(gzip.compress(packed.getvalue(), 9, mtime=0))
    return sum(path.stat().st_size for path in target.iterdir())


if __name__ == "__main__":
    if len(sys.argv) != 3 or not (Path(sys.argv[1]) / "study.json").is_file():
        sys.exit(__doc__)
    print(f"{store(Path(sys.argv[1]), Path(sys.argv[2])):,} bytes in {sys.argv[2]}")
