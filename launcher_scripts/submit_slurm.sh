#!/usr/bin/env bash
# Submit a run as a Slurm job: submit_slurm.sh EXPERIMENT [key=value ...]
#
# ALIGNER_CLUSTER is the path of a file of shell variables that describe the cluster, such as clusters/example_h100.sh.
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

# Quote a value for Hydra, in which a backslash is an escape character only before a quote.
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
