"""TensorRT-LLM as the generation engine."""
