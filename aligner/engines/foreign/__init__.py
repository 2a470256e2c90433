"""Engines that run in processes of their own, each replica driven by its first rank: what
TensorRT-LLM and vLLM share."""
