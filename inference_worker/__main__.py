"""The process's own door: the environment, the clock and chance are taken here, and handed in."""

import os
import random
import sys
import time

from inference_worker.assembly import Outside
from inference_worker.cli import run


def main() -> None:
    """Run the command line and exit with its code."""
    outside = Outside(now=time.time, rng=random.Random())
    sys.exit(run(sys.argv[1:], os.environ, outside))


if __name__ == "__main__":
    main()
