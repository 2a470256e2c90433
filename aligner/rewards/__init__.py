"""Reward sources and reward shaping."""
