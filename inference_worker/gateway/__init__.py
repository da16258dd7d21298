"""The HTTP intake: jobs in, their states and results out."""
