#!/usr/bin/env bash
# Build both images and check that each starts:
#
#   container/build.sh [options of docker build]
#
# Set ENGINE=podman to build with Podman. If the container engine does not respond, nothing is built and the exit code is 69
# (EX_UNAVAILABLE).
set -euo pipefail
cd "$(dirname "$0")/.."
engine=${ENGINE:-docker}
if ! "$engine" info >/dev/null 2>&1; then
    echo "$engine: the container engine does not respond on this machine; no image was built" >&2
    exit 69
fi
# The trainer's image has no servers, so that it accepts only runs without them.
declare -A experiment=([trainer]=arithmetic_sft [server]=tiny_ppo)
for target in trainer server; do
    "$engine" build --target "$target" -t "aligner-$target" "$@" .
    "$engine" run --rm "aligner-$target" --version
    "$engine" run --rm "aligner-$target" validate "experiment=${experiment[$target]}"
done
