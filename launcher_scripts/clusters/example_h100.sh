# A cluster whose nodes have eight GPUs of 80 GB. Copy this file, edit the copy, and set ALIGNER_CLUSTER to its path.
SLURM_ACCOUNT=my_account
SLURM_PARTITION=gpu
SLURM_TIME=1-00:00:00
# Container image for Pyxis: an image in a registry, or a .sqsh file. Leave it unset to run without a container.
# SLURM_IMAGE=/shared/images/aligner-trainer.sqsh
# SLURM_MOUNTS=/shared/models:/shared/models:ro,/shared/data:/shared/data:ro
# Request whole nodes: by default a job gets one CPU per rank and the partition's default memory.
SLURM_SBATCH=(--exclusive --mem=0)
DEVICES_PER_NODE=8
# Usable memory per GPU in GiB: 79.6 GiB minus the CUDA context and the buffers of NCCL.
DEVICE_MEMORY_GIB=76
