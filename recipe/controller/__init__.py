"""The controller's process: agent-lightning's own, whose agents are forked from a process that has imported them."""
