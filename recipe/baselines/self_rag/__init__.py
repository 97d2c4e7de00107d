"""Self-RAG (arXiv 2310.11511) as MemRL's baseline: the policy judges of each tip whether it helps."""
