"""Which role runs where: ranks, devices, ports, Slurm nodes, memory of a device."""
