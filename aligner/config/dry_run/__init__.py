"""Dry runs: a run's roles and layouts with a tiny model on this machine."""
