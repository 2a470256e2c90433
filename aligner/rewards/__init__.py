"""Scoring functions, verifiers, remote scorers and reward models as sources of one weighted
reward."""
