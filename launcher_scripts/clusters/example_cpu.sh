# A cluster without GPUs, such as a test cluster. Add cluster.slurm.gpus=none to the command. Copy this file, edit the copy, and
# set ALIGNER_CLUSTER to its path.
SLURM_PARTITION=main
SLURM_TIME=60
DEVICES_PER_NODE=2
