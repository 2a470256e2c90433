"""Runs on clusters that start one process on each node: Kubernetes and SkyPilot.

Every node runs `aligner supervise`. The first node's process supervises the run and starts ranks
through the agents of all nodes.
"""
