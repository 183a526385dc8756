"""Write docs/compatibility.md from the code: python scripts/compatibility.py [--check].

With ``--check`` nothing is written, and the exit status is 1 where the page differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tilelab.compatibility.table import page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"


def main(arguments: list[str]) -> int:
    """Write the page, or compare."""
    text = page()
    if arguments == ["--check"]:
        same = PAGE.exists() and PAGE.read_text() == text
        print(f"docs/{PAGE.name} {'shows' if same else 'is out of date with'} the code")
        return int(not same)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
