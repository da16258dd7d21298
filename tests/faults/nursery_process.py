"""Begets workers by fork: `python -m tests.faults.nursery_process '<flags, environment and modules as JSON>'`.

A line on stdin is the seed of one more `inference-worker process`; its pid is the line on stdout. All is imported and
nothing runs before the fork, so that a worker costs a hundredth of a second, and can be killed a thousand times. The
workers die with the nursery.
"""

import asyncio
import ctypes
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from typing import Final

from inference_worker import logs
from inference_worker.assembly import Outside
from inference_worker.process import run_process
from inference_worker.process_setup import read_setup

PR_SET_PDEATHSIG: Final = 1
NO_FILES: Final[dict[str, str]] = {}


def work(flags: dict[str, str], environ: dict[str, str], seed: int) -> None:
    """Be a worker, until killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rng = random.Random(seed)
    setup = read_setup(flags, environ, NO_FILES.__getitem__, rng)
    asyncio.run(run_process(setup, Outside(now=time.time, rng=rng), asyncio.Event(), lambda *_: None))


def main() -> None:
    said = json.loads(sys.argv[1])
    for module in said["modules"]:
        importlib.import_module(module)  # Once, not by each worker.
    logs.configure("error", "json", sys.stderr)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The dead are not waited for.
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                work(said["flags"], said["environ"], int(line))
            finally:  # It only ends by a fault, or by a kill, which sees nothing of this.
                traceback.print_exc()
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
