"""``python -m annbatch_distributed``: the command line."""

import sys

from annbatch_distributed.cli import main

if __name__ == "__main__":
    sys.exit(main())
