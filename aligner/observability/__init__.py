"""Metrics and trackers, sample files, logs, the timeline, and the console output of a run."""
