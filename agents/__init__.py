"""Agents and their environments: ordinary OpenAI clients that know nothing of training."""
