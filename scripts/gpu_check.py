"""Check the GPU backend on a GPU: scripts/gpu_check.py [--out DIR] [--only STEP ...] [--self-test].

Runs from the source tree with Python, torch, Triton and numpy, and nothing else; under nine
minutes. Writes gpu_check.json and gpu_check.txt to DIR ($OUT where that is set) and prints the
table last. docs/gpu.md says what it does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lab" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilelab.gpu_check import main

if __name__ == "__main__":
    sys.exit(main())
