"""MemRL (arXiv 2601.03192): tips by learned value, checks of these values, and its baselines as settings."""
