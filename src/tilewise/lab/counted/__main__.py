"""``python -m tilewise.lab.counted``."""

import sys

from tilewise.lab.counted.command import main

if __name__ == "__main__":
    sys.exit(main())
