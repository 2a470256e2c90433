"""Environments, agents and their OpenAI-compatible endpoint: episodes of several turns."""
