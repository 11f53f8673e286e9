"""`python -m minillm`: see minillm/cli."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.exit(main())
