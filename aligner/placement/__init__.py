"""Placement of roles: ranks, devices, ports, Slurm nodes and device memory."""
