"""Runs as Slurm jobs: the batch script, its submission, and the supervisor inside the job."""
