"""Patches that verl 0.8 and vLLM 0.20 need without a GPU or flash-attn, and patches of agent-lightning.

Those that verl 0.9.1 makes unnecessary, or something else, say so: its source was read, and two steps were trained with
it, the other patches as they were. agent-lightning 1.0.2 itself imports two names that moved there
(``create_rl_sampler``, ``TaskRunner``), so the first step is upstream's.
"""
