"""Patches that verl 0.8 and vLLM 0.20 need without a GPU or flash-attn, and patches of agent-lightning."""
