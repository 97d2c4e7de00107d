"""Patches that verl 0.8 and vLLM 0.20 need without a GPU or flash-attn, and patches of agent-lightning.

Each says what it would become with verl 0.9.1, whose source was read for it. agent-lightning 1.0.2 itself imports two
names that moved there (``create_rl_sampler``, ``TaskRunner``), so the first step is upstream's.
"""
