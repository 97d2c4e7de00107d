"""Agents without a trainer, and the routes that they expect of a model server."""
