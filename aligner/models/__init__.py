"""Models as numbers: families, shapes, which slice of a weight lies where, adapters, Hugging Face
and GGUF headers."""
