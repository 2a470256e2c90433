"""Metrics, progress and the run's summary."""
