"""LifelongAgentBench (Zheng et al., 2025, arXiv 2505.11942): tasks on tables and on machines. docs/memrl-worlds.md."""
