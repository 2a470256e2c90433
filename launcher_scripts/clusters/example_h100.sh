# Nodes of eight 80 GB GPUs, jobs in containers. Copy, edit, and name the copy in ALIGNER_CLUSTER.
SLURM_ACCOUNT=my_account
SLURM_PARTITION=gpu
SLURM_TIME=1-00:00:00
# Pyxis: an image of a registry, or a .sqsh file; leave it out to run without a container.
# SLURM_IMAGE=/shared/images/aligner-trainer.sqsh
# SLURM_MOUNTS=/shared/models:/shared/models:ro,/shared/data:/shared/data:ro
# Whole nodes: what a cluster gives a job by default is a CPU a rank and a share of the memory.
SLURM_SBATCH=(--exclusive --mem=0)
DEVICES_PER_NODE=8
# Of 79.6 GiB what a GPU's context and NCCL leave.
DEVICE_MEMORY_GIB=76
