"""BigCodeBench (Zhuo et al., 2024, arXiv 2406.15877): write functions that pass hidden tests. docs/memrl-worlds.md."""
