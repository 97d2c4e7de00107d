"""What runs inside vLLM: named by its options, and imported in its processes alone."""
