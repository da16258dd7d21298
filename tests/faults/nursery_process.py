"""Begets and kills workers: `python -m tests.faults.nursery_process '<flags, environment and modules as JSON>'`.

A line on stdin says what to do, a line on stdout what came of it. `beget SEED` forks one more `inference-worker
process`, or `inference-worker run` where there are no flags, and tells its pid. `kill PID` tells how that one ended:
-9, or what it ended with by itself before. All is imported and nothing runs before the fork, so that a worker costs a
hundredth of a second, and can be killed a thousand times. The workers die with the nursery.
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
from inference_worker.assembly import Outside, run_worker
from inference_worker.config.settings import load
from inference_worker.process import run_process
from inference_worker.process_setup import read_setup

PR_SET_PDEATHSIG: Final = 1
NO_FILES: Final[dict[str, str]] = {}


def work(flags: dict[str, str], environ: dict[str, str], seed: int) -> None:
    """Be a worker, until killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rng = random.Random(seed)
    outside, stop = Outside(now=time.time, rng=rng), asyncio.Event()
    if flags:
        setup = read_setup(flags, environ, NO_FILES.__getitem__, rng)
        asyncio.run(run_process(setup, outside, stop, lambda *_: None))
    else:
        asyncio.run(run_worker(load({**environ, "REPLICA_ID": f"replica-{seed}"}), outside, stop, lambda *_: None))


def beget(flags: dict[str, str], environ: dict[str, str], seed: int) -> int:
    """One more worker, and its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work(flags, environ, seed)
        finally:  # It only ends by a fault, or by a kill, which sees nothing of this.
            traceback.print_exc()
            os._exit(1)
    return pid


def kill(pid: int) -> int:
    """What it ended with. Nobody else waits for it, so that the pid is its own until now."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    said = json.loads(sys.argv[1])
    for module in said["modules"]:
        importlib.import_module(module)  # Once, not by each worker.
    logs.configure("error", "json", sys.stderr)
    for line in sys.stdin:
        verb, number = line.split()
        came = beget(said["flags"], said["environ"], int(number)) if verb == "beget" else kill(int(number))
        print(came, flush=True)


if __name__ == "__main__":
    main()
