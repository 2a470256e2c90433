# What a run reads from the environment. Copy, edit, and name the copy in ALIGNER_ENVIRONMENT.

# Where converted models are kept; the user's cache directory when unset.
# export ALIGNER_CACHE=/path/with/room

# No colors in messages.
# export NO_COLOR=1

# The launcher sets these for every rank, and overrides what is set here:
#   RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
#   OMP_NUM_THREADS MKL_NUM_THREADS GOMP_SPINCOUNT TOKENIZERS_PARALLELISM
