"""An offline critic of actions, as Retrospex's (arXiv 2505.11807): implicit Q-learning on stored episodes."""
