"""Patches that verl 0.8 and vLLM 0.20 need without a GPU or flash-attn, and patches of agent-lightning.

Those that verl 0.9.1 makes unnecessary, or something else, say so. tests/test_next_verl.py trains two steps with it and
these patches; tests/verl_09.py is what it needs beside. agent-lightning 1.0.2 itself imports two names that moved there
(``create_rl_sampler``, ``TaskRunner``), so the first step is upstream's.
"""
