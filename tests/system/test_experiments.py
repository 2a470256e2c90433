"""Tests of chains of experiments, and of a loop of sampling and training.

The chain samples pairs, trains a reward model on the pairs, and trains a policy with this model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.config.compose import load_config
from aligner.data.export import find_source
from aligner.models.model_source import read_normalization
from aligner.observability.metrics import RunningChecksum, read_metrics, read_records
from aligner.paths import RunPaths
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import digit_fraction
from benchmarks.runs import REPOSITORY, Finished, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLING = (
    "rollout: {prompts_per_step: 8, samples_per_prompt: 3, max_response_tokens: 6, stop_at_eos:"
    " false}"
)
EXPERIMENTS = {
    "pairs": (
        f"""
defaults: [override /algorithm: preferences]
run: {{steps: 3}}
{SAMPLING}
actor: {{optimizer: {{warmup_steps: 2}}}}  # an unused key
logging: {{tensorboard: false}}
"""
    ),
    "judge": (
        """
defaults: [override /algorithm: reward_model]
run: {steps: 2}
data:
  path: experiment:pairs
  normalization: experiment:pairs/responses.jsonl
  end_of_sequence: false
  batch_size: 8
critic: {num_layers: 2}
logging: {tensorboard: false}
"""
    ),
    "judged": (
        f"""
defaults: [override /algorithm: grpo]
run: {{steps: 2}}
{SAMPLING}
reward: {{kind: model, path: "experiment:judge"}}
logging: {{tensorboard: false}}
"""
    ),
    "own": (
        f"""
defaults: [override /algorithm: preferences]
run: {{steps: 1}}
algorithm: {{pairs: none, responses: best, min_score: 0.01}}
{SAMPLING}
logging: {{tensorboard: false}}
"""
    ),
    "better": (
        """
defaults: [override /algorithm: sft]
run: {steps: 2}
data: {path: "experiment:own", batch_size: 4}
logging: {tensorboard: false}
"""
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("experiments")
    (place / "conf" / "experiment").mkdir(parents=True)
    for name, content in EXPERIMENTS.items():
        (place / "conf" / "experiment" / f"{name}.yaml").write_text(
            f"# @package _global_\n{content}"
        )
    return place


@pytest.fixture(scope="module")
def chain(place: Path) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGNER_CACHE", str(place / "cache"))
        return run_to_end(
            place / "run", "experiment=judged", f"--config-dir={place / 'conf'}", timeout_s=280
        )


def cached(place: Path, name: str) -> Path:
    (entry,) = (place / "cache" / "experiments").glob(f"{name}-*")
    return entry


def test_one_launch_runs_chain_of_prerequisites(chain: Finished, place: Path) -> None:
    firsts = [
        line.split()[3]
        for line in chain.out.splitlines()
        if line.startswith("running prerequisite experiment ")
    ]
    assert firsts == ["pairs", "judge"]
    assert len(chain.metrics) == 2
    assert {
        entry.name.partition("-")[0] for entry in (place / "cache" / "experiments").iterdir()
    } == {"pairs", "judge"}


def test_pairs_are_best_and_worst_samples(chain: Finished, place: Path) -> None:
    result = cached(place, "pairs") / "result"
    pairs, responses = (
        read_records(result / "preferences.jsonl"),
        read_records(result / "responses.jsonl"),
    )
    steps = read_metrics(RunPaths(cached(place, "pairs") / "run").metrics)
    assert len(responses) == 3 * 8 * 3
    assert len(pairs) == sum(step["preferences/pairs"] for step in steps) > 8
    assert [step["preferences/pairs"] + step["preferences/without_pair"] for step in steps] == [
        8,
        8,
        8,
    ]
    for pair in pairs:
        texts = (pair["chosen"], pair["rejected"])
        assert pair["scores"] == pytest.approx(
            digit_fraction([ScoringRequest(pair["prompt"], text) for text in texts])
        )
        assert pair["margin"] == pytest.approx(pair["scores"][0] - pair["scores"][1])
        assert pair["margin"] > 0
        group = [
            each["reward"]
            for each in responses
            if (each["step"], each["prompt"]) == (pair["step"], pair["prompt"])
        ]
        assert pair["scores"] == [max(group), min(group)]


def test_reward_model_has_layers_and_normalization(chain: Finished, place: Path) -> None:
    result = cached(place, "judge") / "result"
    assert json.loads((result / "config.json").read_text())["num_hidden_layers"] == 2
    assert find_source(result).head == "scalar"
    gain, bias = read_normalization(result)
    assert (gain, bias) != (1.0, 0.0)
    assert not (cached(place, "judge") / "run" / "checkpoints").exists()


def test_killed_sampling_resumes_with_equal_records(chain: Finished, place: Path) -> None:
    entry, run = cached(place, "pairs"), RunPaths(place / "killed")
    shutil.copytree(entry / "run", run.root)
    for file in (run.preferences, run.responses):
        whole = file.stat().st_size
        # The run was killed while it wrote the records of the third step.
        os.truncate(file.rename(file.with_name(f"{file.name}.unfinished")), whole - 5)
    steps = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(steps[:2]))
    RunningChecksum(run.metrics, run.metrics_checksum).restart(run.metrics.stat().st_size)
    resumed = run_to_end(
        run.root, "--config-dir", str(place / "conf"), "run.resume=true", experiment="pairs"
    )
    for file in (run.preferences, run.responses):
        assert file.read_text() == (entry / "result" / file.name).read_text()
    assert repeatable(resumed.metrics) == repeatable([json.loads(step) for step in steps])


def run_rounds(place: Path, rounds: int) -> list[str]:
    """Run `rounds.sh` up to a number of rounds; return the run directories that it launched."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [
            str(REPOSITORY / "launcher_scripts" / "rounds.sh"),
            *("own", "better", str(rounds), "loop"),
            f"--config-dir={place / 'conf'}",
            "cluster.threads_per_rank=1",
        ],
        cwd=place,
        env={**os.environ, "PATH": path, "ALIGNER_CACHE": str(place / "loop_cache")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    prefix = "run directory: "
    lines = [line for line in done.stdout.splitlines() if line.startswith(prefix)]
    return [line.removeprefix(prefix) for line in lines]


def test_rounds_script_trains_on_samples_of_the_previous_policy(place: Path) -> None:
    first, second = place / "loop" / "round1", place / "loop" / "round2"
    assert run_rounds(place, 1) == [str(first / "samples"), str(first / "training")]
    assert run_rounds(place, 2) == [str(second / "samples"), str(second / "training")]
    assert run_rounds(place, 2) == []

    for number, directory in enumerate((first, second), start=1):
        sampling = load_config(directory / "samples" / "config.yaml")
        training = load_config(directory / "training" / "config.yaml")
        assert sampling.seed == number
        assert sampling.cluster.threads_per_rank == training.cluster.threads_per_rank == 1
        assert training.data.path == str(directory / "samples" / "responses.jsonl")
        source = ("random", None) if number == 1 else ("directory", str(first / "policy"))
        assert (sampling.model.source, sampling.model.path) == source
        assert (training.model.source, training.model.path) == source
        assert find_source(directory / "policy").head == "vocabulary"

        samples = read_records(directory / "samples" / "responses.jsonl")
        assert 0 < len(samples) <= 8
        assert min(sample["reward"] for sample in samples) >= 0.01
