"""vLLM as the generation engine."""
