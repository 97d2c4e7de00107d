"""Retrospex (arXiv 2505.11807): a critic, trained offline on kept rollouts, picks among the frozen model's samples."""
