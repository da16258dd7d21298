"""Serves a GGUF by llama.cpp's own HTTP server, through the xllamacpp wheel, until it is killed.

python -m tests.llamacpp.serve MODEL.gguf PORT SLOTS
"""

import sys
import threading

import xllamacpp


def main(model: str, port: int, slots: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = ["tiny"]
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = 1024 * slots
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
