"""Reflexion (arXiv 2303.11366): the newest reflections of the same task."""
