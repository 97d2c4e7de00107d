"""The gateway's process: agent-lightning's app with a memory in it."""
