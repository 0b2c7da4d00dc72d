"""Runs the command as `python -m stabil.cli`."""

import sys

from stabil.cli._main import main

if __name__ == "__main__":
    sys.exit(main())
