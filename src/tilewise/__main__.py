"""``python -m tilewise``: the command, where its folder is not on the path."""

import sys

from tilewise.cli import main

if __name__ == "__main__":
    sys.exit(main())
