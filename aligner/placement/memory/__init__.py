"""Calculation of the device memory of each role from the configuration (`docs/memory.md`)."""
