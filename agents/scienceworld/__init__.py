"""ScienceWorld (Wang et al., 2022): its tasks, its environment and an agent that plays it."""
