"""Retrospex (arXiv 2505.11807): an offline critic, learned from stored episodes, picks among the policy's samples."""
