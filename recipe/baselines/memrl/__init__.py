"""MemRL (arXiv 2601.03192): tips by learned value, and its baselines as settings."""
