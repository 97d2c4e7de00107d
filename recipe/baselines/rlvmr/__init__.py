"""RLVMR (arXiv 2507.22844): rewards for turns that are tagged as planning, exploring, reflecting or monitoring."""
