"""What runs in the environment of vLLM: nothing here imports aligner, nor is it imported by it."""
