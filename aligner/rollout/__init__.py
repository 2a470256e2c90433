"""From prompts to samples to experience."""
