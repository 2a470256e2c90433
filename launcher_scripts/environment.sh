# Environment variables that a run reads. Copy this file, edit the copy, and set ALIGNER_ENVIRONMENT to its path.

# Directory of the cache, such as converted models; by default in the user's cache directory.
# export ALIGNER_CACHE=/path/with/room

# Print messages without colors.
# export NO_COLOR=1

# The launcher sets these variables for every rank and overrides values that are set here:
#   RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
#   OMP_NUM_THREADS MKL_NUM_THREADS GOMP_SPINCOUNT TOKENIZERS_PARALLELISM
