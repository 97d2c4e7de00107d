"""ALFWorld (Shridhar et al., 2021, arXiv 2010.03768): household tasks as text, in plain Python. docs/alfworld.md."""
