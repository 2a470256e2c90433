"""Prompts, samples and experience, and how they are batched."""
