"""Runs as JobSets on Kubernetes: the JobSet of a run, and its submission with kubectl."""
