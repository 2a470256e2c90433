"""Scoring functions."""
