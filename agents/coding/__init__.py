"""Coding agents as they are, each episode in a room of its own: ``python -m empo2.agents.coding AGENT``."""
