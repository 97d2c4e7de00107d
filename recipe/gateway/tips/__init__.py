"""The tips of a request: its state, what is found for it, how it reads and where it stands."""
