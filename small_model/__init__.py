"""A small model that reads and writes notes: SmolLM2-135M-Instruct and a LoRA made from scripted play.

The launcher needs `adapter/` alone, the command line `demo`; the rest makes it (`make small-model`) and measures it.
"""
