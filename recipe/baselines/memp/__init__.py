"""MemP (arXiv 2508.06433): procedures with the trajectories that they come from, revised where they fail."""
