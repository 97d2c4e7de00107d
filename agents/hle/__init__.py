"""Humanity's Last Exam (Phan et al., 2025, arXiv 2501.14249): questions, for evaluation alone. docs/memrl-worlds.md."""
