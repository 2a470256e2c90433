"""Descriptions of models: families, shapes, weight slices, LoRA adapters, and file headers."""
