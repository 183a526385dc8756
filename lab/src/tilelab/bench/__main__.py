"""``python -m tilelab.bench``: the bench without the ``tilewise`` command around it."""

import sys

from tilelab.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
