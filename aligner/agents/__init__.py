"""Episodes of several turns: environments, tools, agents and their OpenAI-compatible endpoint.

The package also implements the commands `aligner generate` and `aligner serve-model`.
"""
