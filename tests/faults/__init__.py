"""Broken neighbours: a proxy, processes to kill, a model, and sinks, each of which fails as told."""
