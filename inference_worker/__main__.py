"""The process's own door: the environment, the clock and chance are taken here, and handed in."""

import os
import random
import signal
import sys
import time


def main() -> None:
    """Run the command line and exit with its code."""
    # Loading takes a while, and a stop that is asked for meanwhile is a stop: as the first process of a container we
    # would not even notice it without a handler. Nothing is in hand as yet. An exception would be lost in a callback of
    # the interpreter's own, of which loading has many, and the stop with it.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from inference_worker.assembly import Outside
    from inference_worker.cli import run

    outside = Outside(now=time.time, rng=random.Random())
    code = run(sys.argv[1:], os.environ, outside)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # A handler would go before the process does, and the signal kill it.
    sys.exit(code)


if __name__ == "__main__":
    main()
