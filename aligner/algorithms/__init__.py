"""Formulas of the algorithms as pure functions of tensors, and their combinations."""
