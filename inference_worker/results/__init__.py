"""Where terminal results and claims are kept; one file a store."""
