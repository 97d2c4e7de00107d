"""REMEMBERER (arXiv 2306.07929): actions with the values that they had in similar states, learned by n-step Q."""
