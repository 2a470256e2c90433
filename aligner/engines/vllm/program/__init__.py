"""What runs in the environment of vLLM: nothing here imports aligner, which imports `weight_memory`
alone of it."""
