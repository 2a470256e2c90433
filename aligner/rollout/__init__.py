"""Generation and scoring of samples, synchronously or ahead of training."""
