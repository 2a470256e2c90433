"""Composition, automatic values, prerequisites and resumption of configurations; dry runs."""
