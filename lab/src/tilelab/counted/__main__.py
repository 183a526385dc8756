"""``python -m tilelab.counted``."""

import sys

from tilelab.counted.command import main

if __name__ == "__main__":
    sys.exit(main())
