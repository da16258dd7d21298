"""A sidecar that serves a model from a queue: it consumes requests, calls the model, stores results, reports."""
