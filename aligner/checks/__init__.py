"""What a configuration must fit: one file a section of the schema."""
