# Nodes without GPUs, such as a cluster to try things out on: add cluster.slurm.gpus=none to the command.
SLURM_PARTITION=main
SLURM_TIME=60
DEVICES_PER_NODE=2
