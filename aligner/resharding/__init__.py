"""Weights from the trainer's layout into the engine's, by a computed plan."""
