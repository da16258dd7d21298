"""Measurements, not tests: `make bench`, or `python -m tests.bench throughput|latency`."""
