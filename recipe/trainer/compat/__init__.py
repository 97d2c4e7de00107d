"""What verl 0.8 and vLLM 0.20 need where there is no GPU, or no flash-attn: one module for each of them."""
