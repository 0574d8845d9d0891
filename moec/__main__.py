"""`python -m moec` is the console script `moec`."""

import sys

from moec.compiler.cli import main

if __name__ == "__main__":
    sys.exit(main())
