"""Predicts how long a step of the pipeline takes at a placement, and where more devices would
help."""
