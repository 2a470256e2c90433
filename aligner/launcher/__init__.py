"""Start, monitor and stop the processes of a run, on one machine or in a Slurm job."""
