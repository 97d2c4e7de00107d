"""Base classes of the text worlds: an episode and its variables, a game in turns, the agent that plays it, Java."""
