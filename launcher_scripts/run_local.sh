#!/usr/bin/env bash
# Launch a run on this machine: run_local.sh EXPERIMENT [key=value ...]
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: ${0##*/} EXPERIMENT [key=value ...]" >&2
    exit 2
fi
# shellcheck source=environment.sh
source "${ALIGNER_ENVIRONMENT:-$(dirname "${BASH_SOURCE[0]}")/environment.sh}"
# exec replaces the shell with the launcher, so the launcher receives the signals that are sent to this script.
exec aligner launch "experiment=$1" "${@:2}"
