"""What ``empo2 init`` does: record an episode, find what would happen to it in training, say so."""
