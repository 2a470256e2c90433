"""Runs as SkyPilot tasks: the task file of a run, and its submission as a managed job."""
