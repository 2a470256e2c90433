"""Sources of the reward: scoring functions, verifiers, judges, remote scorers, reward models."""
