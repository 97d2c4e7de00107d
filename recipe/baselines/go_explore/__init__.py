"""Go-Explore (arXiv 2004.12919) and IGE (arXiv 2405.15143): episodes start in states reached before."""
