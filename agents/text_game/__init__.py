"""What the text worlds share: an episode and its variables, a game in turns, the agent that plays it, Java."""
