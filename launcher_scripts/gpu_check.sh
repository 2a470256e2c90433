#!/usr/bin/env bash
# Check on a GPU node of a Slurm cluster which parts of aligner work, and print a table:
#
#   gpu_check.sh [options of python -m benchmarks.gpu_check]
#
# Run it in a checkout on a file system that the nodes share. ALIGNER_CLUSTER names a file that describes the cluster, as for
# submit_slurm.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -z ${ALIGNER_CLUSTER:-} ]]; then
    echo "usage: ALIGNER_CLUSTER=$here/clusters/example_h100.sh ${0##*/} [--output FILE] [--limit-s SECONDS]" >&2
    exit 2
fi
# shellcheck source=environment.sh
source "${ALIGNER_ENVIRONMENT:-$here/environment.sh}"
# shellcheck source=clusters/example_h100.sh
source "$ALIGNER_CLUSTER"

flags=(--job-name=gpu_check --nodes=1 --ntasks=1 --gpus-per-node=1)
for name in account partition qos reservation constraint time; do
    variable=SLURM_${name^^}
    [[ -z ${!variable:-} ]] || flags+=("--$name=${!variable}")
done
if [[ -n ${SLURM_IMAGE:-} ]]; then
    flags+=("--container-image=$SLURM_IMAGE" "--container-mounts=$PWD:$PWD${SLURM_MOUNTS:+,$SLURM_MOUNTS}" "--container-workdir=$PWD")
fi
exec srun "${flags[@]}" "${SLURM_SBATCH[@]}" python3 -m benchmarks.gpu_check "$@"
