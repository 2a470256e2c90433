#!/usr/bin/env bash
# Queue a run as a Slurm job: submit_slurm.sh EXPERIMENT [key=value ...]
# The cluster is described in a file of shell variables, such as clusters/example_h100.sh, that ALIGNER_CLUSTER names.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
if [[ $# -lt 1 || -z ${ALIGNER_CLUSTER:-} ]]; then
    echo "usage: ALIGNER_CLUSTER=$here/clusters/example_h100.sh ${0##*/} EXPERIMENT [key=value ...]" >&2
    exit 2
fi
# shellcheck source=environment.sh
source "${ALIGNER_ENVIRONMENT:-$here/environment.sh}"
# shellcheck source=clusters/example_h100.sh
source "$ALIGNER_CLUSTER"

# In Hydra's quotes: a backslash counts there only before a quote.
quoted() {
    printf "'%s'" "$(sed -E "s/(\\\\*)'/\\1\\1\\\\'/g; s/(\\\\*)\$/\\1\\1/" <<<"$1")"
}

overrides=()
for name in account partition qos reservation constraint time image; do
    variable=SLURM_${name^^}
    [[ -z ${!variable:-} ]] || overrides+=("cluster.slurm.$name=$(quoted "${!variable}")")
done
[[ -z ${SLURM_MOUNTS:-} ]] || overrides+=("cluster.slurm.mounts=[$SLURM_MOUNTS]")
if [[ -n ${SLURM_SBATCH:-} ]]; then
    flags=$(for flag in "${SLURM_SBATCH[@]}"; do quoted "$flag" && printf ,; done)
    overrides+=("cluster.slurm.sbatch=[${flags%,}]")
fi
[[ -z ${DEVICES_PER_NODE:-} ]] || overrides+=("cluster.devices_per_node=$DEVICES_PER_NODE")
[[ -z ${DEVICE_MEMORY_GIB:-} ]] || overrides+=("cluster.device_memory_gib=$DEVICE_MEMORY_GIB")
exec aligner launch cluster=slurm "experiment=$1" "${overrides[@]}" "${@:2}"
