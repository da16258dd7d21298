"""The configuration: what a variable may hold (`values`), and all of them (`settings`)."""
