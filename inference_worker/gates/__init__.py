"""Who may be sent to the model now: one family of gates a file, each fills `ports.Gate`."""
