"""`python -m zpp_lab.cli`: the console script without its installation."""

import sys

from zpp_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
