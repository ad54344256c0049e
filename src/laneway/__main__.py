"""``python -m laneway`` is the command ``laneway``, so torchrun can start it: ``torchrun --nproc-per-node 2 -m laneway …``."""

import sys

from laneway.cli import main

if __name__ == "__main__":
    sys.exit(main())
