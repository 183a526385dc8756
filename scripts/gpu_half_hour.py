"""The first half hour on a GPU: scripts/gpu_half_hour.py A|B|C [--out DIR] [--self-test].

Runs from the source tree with Python, torch, Triton and numpy, and nothing else. The three
commands share DIR ($OUT where that is set); each goes on from what is there. docs/gpu.md says what
they do.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lab" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilelab.tune.half_hour import main

if __name__ == "__main__":
    sys.exit(main())
