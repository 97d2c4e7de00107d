"""What is held of a rollout until it ends, and what is learned from it then."""
