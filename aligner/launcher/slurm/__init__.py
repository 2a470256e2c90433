"""Runs as Slurm jobs: the job's script, its submission, and what watches the roles inside it."""
