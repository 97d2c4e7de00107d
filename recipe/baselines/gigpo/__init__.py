"""GiGPO (arXiv 2505.10978): an advantage for each turn. docs/algorithm.md has its rules."""
