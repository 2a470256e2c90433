#!/usr/bin/env bash
# Build both images and see that each starts: `container/build.sh [flags of docker build]`; ENGINE=podman for another engine.
# Where no engine answers nothing is built, and the exit code is 69, as of a service that is not available.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=${ENGINE:-docker}
if ! "$engine" info >/dev/null 2>&1; then
    echo "$engine: no daemon answers on this machine, so that no image was built" >&2
    exit 69
fi
for target in trainer server; do
    "$engine" build --target "$target" -t "aligner-$target" "$@" .
    "$engine" run --rm "aligner-$target" --version
    "$engine" run --rm "aligner-$target" validate experiment=tiny_ppo
done
