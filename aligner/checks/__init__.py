"""Checks of a configuration; one file per section of the schema."""
