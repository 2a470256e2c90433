# Nodes of eight 80 GiB GPUs, jobs in containers. Copy, edit, and name the copy in ALIGNER_CLUSTER.
SLURM_ACCOUNT=my_account
SLURM_PARTITION=gpu
SLURM_TIME=1-00:00:00
# Pyxis: an image of a registry, or a .sqsh file; leave it out to run without a container.
# SLURM_IMAGE=/shared/images/aligner-trainer.sqsh
# SLURM_MOUNTS=/shared/models:/shared/models:ro,/shared/data:/shared/data:ro
DEVICES_PER_NODE=8
DEVICE_MEMORY_GIB=80
