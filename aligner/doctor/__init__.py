"""Checks of a machine for `aligner doctor`."""
