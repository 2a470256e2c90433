"""Dry runs: the roles and layouts of a run with a tiny model on this machine's CPU."""
