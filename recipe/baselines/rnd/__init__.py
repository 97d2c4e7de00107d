"""Random network distillation (Burda et al. 2018, arXiv 1810.12894) as the novelty, as in EMPO²'s figure 11."""
