#!/usr/bin/env bash
# Run ROUNDS rounds of "sample, then train", such as rejection sampling or iterated DPO:
#
#   rounds.sh SAMPLING TRAINING ROUNDS DIRECTORY [MODEL] [key=value ...]
#
# SAMPLING is an experiment with algorithm=preferences, TRAINING an experiment that trains on its data. Each round samples from the
# policy of the previous round and trains that policy on the samples. The first round starts from MODEL, a Hugging Face directory or
# experiment:NAME; by default from the models of the experiments. The key=value overrides are passed to both experiments, so both must
# accept them; to change only one of the experiments, write your own.
#
# Round N writes its runs to DIRECTORY/roundN/samples and DIRECTORY/roundN/training, and the policy to DIRECTORY/roundN/policy, a
# Hugging Face directory. Run the same command again to resume after an interruption, or with a larger ROUNDS to continue.
set -euo pipefail

if [[ $# -lt 4 || ! $3 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: ${0##*/} SAMPLING TRAINING ROUNDS DIRECTORY [MODEL] [key=value ...]" >&2
    exit 2
fi
# shellcheck source=environment.sh
source "${ALIGNER_ENVIRONMENT:-$(dirname "${BASH_SOURCE[0]}")/environment.sh}"

sampling=$1 training=$2 rounds=$3
mkdir -p "$4"
directory=$(cd "$4" && pwd)
shift 4

model=()
if [[ $# -gt 0 && ! $1 =~ ^[-+~a-z0-9_.]+= ]]; then
    model=(model.source=directory "model.path=$1")
    shift
fi

for ((round = 1; round <= rounds; round++)); do
    samples=$directory/round$round/samples
    trained=$directory/round$round/training
    policy=$directory/round$round/policy

    if [[ ! -d $policy ]]; then
        # responses.jsonl is the last file that a sampling run completes. The seed selects other prompts and samples in each round.
        if [[ ! -f $samples/responses.jsonl ]]; then
            aligner launch "experiment=$sampling" "seed=$round" "${model[@]}" "run.dir=$samples" run.resume=auto "$@"
        fi

        data=$samples/preferences.jsonl
        [[ -f $data ]] || data=$samples/responses.jsonl
        aligner launch "experiment=$training" "${model[@]}" "data.path=$data" "run.dir=$trained" run.resume=auto "$@"
        aligner convert "$trained" "$policy"
    fi

    model=(model.source=directory "model.path=$policy")
    echo "round $round of $rounds: $policy"
done
