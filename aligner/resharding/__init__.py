"""Weight transfer from the trainer's layout to the engine's layout, by a computed plan."""
