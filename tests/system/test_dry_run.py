"""Tests of dry runs, which run the roles and layouts of a large run for two steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.config.compose import load_config
from aligner.data.model_directory import read_shape
from aligner.observability.metrics import read_metrics, read_records
from aligner.paths import RunPaths
from benchmarks.runs import Finished, Launch, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "eos_token_id": [128001, 128009],
}
EXPERIMENT = f"""# @package _global_
run: {{steps: 500}}
model:
  source: random
  config: {json.dumps(MODEL | {"architectures": ["LlamaForCausalLM"]})}
data: {{path: chats.jsonl, prompts: [], max_prompt_tokens: 1024}}
rollout: {{prompts_per_step: 128, samples_per_prompt: 4, max_response_tokens: 1024, max_staleness: 1}}
algorithm: {{minibatches: 4, truncated_importance: token}}
actor:
  parallel: {{tensor: 8, sequence: true, pipeline: 4}}
  optimizer: {{distributed: true, warmup_steps: 20}}
  recompute: full
engine: {{placement: server, update: in_place, parallel: {{tensor: 8, data: 1}}}}
critic: {{num_layers: 16}}
reward: {{kind: model, path: judge}}
logging: {{tensorboard: false}}
dry_run: {{scale: tiny, max_ranks: 8}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an experiment, its data, and a reward model's config.json without weights."""
    place = tmp_path_factory.mktemp("dry_run")
    (place / "conf" / "experiment").mkdir(parents=True)
    (place / "conf" / "experiment" / "large.yaml").write_text(EXPERIMENT)
    chats = [
        [{"role": "user", "content": f"Wie heißt der {number}. Planet? 🪐 " * 40}]
        for number in range(1, 9)
    ]
    (place / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    (place / "judge").mkdir()
    judge = MODEL | {"architectures": ["LlamaForSequenceClassification"]}
    (place / "judge" / "config.json").write_text(json.dumps(judge))
    return place


def launch_experiment(
    place: Path, name: str, *overrides: str, experiment: str = "large"
) -> Finished:
    with Launch(
        place / name, f"--config-dir={place / 'conf'}", *overrides, experiment=experiment
    ) as launch:
        return launch.finish(400)


@pytest.mark.promise("dry-run-rehearses-large-layouts")
def test_dry_run_trains_with_scaled_layouts(place: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run = run_to_end(
            place / "run", f"--config-dir={place / 'conf'}", experiment="large", timeout_s=500
        )
    paths = RunPaths(place / "run-dry-run")
    assert run.out.startswith(f"run directory: {paths.root}\n")
    metrics = read_metrics(paths.metrics)
    assert [step["step"] for step in metrics] == [1, 2]
    assert metrics[0]["mismatch/logprob_abs"] < 1e-5
    assert (paths.checkpoint(2, "policy") / "rank_0.safetensors").is_file() and paths.checkpoint(
        2, "critic"
    ).is_dir()
    config = load_config(paths.config)
    assert (
        config.actor.parallel.ranks == 4
        and config.actor.parallel.sequence
        and config.engine.parallel.tensor == 2
    )
    assert (read_shape(paths.initial_model).num_layers, config.critic.num_layers) == (4, 2)
    assert all("Planet? 🪐" in sample["prompt"] for sample in read_records(paths.samples))
    last_line = run.out.splitlines()[-1]
    assert last_line.startswith(
        "dry run passed: 2 steps with trainer TP2+SP PP2 DP1, generator TP2 DP1, critic TP1 PP1"
        " DP1, reward"
    )
    assert "resharded into the generator's layout, verified by checksum" in last_line
    assert not (place / "run").exists()


def test_dry_run_refuses_invalid_large_layout(place: Path) -> None:
    run = launch_experiment(place, "refused", "actor.parallel.pipeline=33")
    assert run.code == 2
    assert run.error.startswith(
        "aligner: error: actor.parallel.pipeline=33: must be at most the model's 32 layers"
    )
    assert not list(place.glob("refused*"))


def test_dry_run_reports_error_of_a_training_step(place: Path) -> None:
    (place / "broken.py").write_text(
        "def loss(logprobs, rows, context):\n    raise RuntimeError('no such luck')\n"
    )
    run = launch_experiment(
        place,
        "broken_loss",
        "algorithm.loss=broken:loss",
        "dry_run.scale=tiny",
        experiment="tiny_ppo",
    )
    assert run.code == 1
    assert "algorithm.loss=broken:loss: the function raised RuntimeError: no such luck" in run.error


def test_missing_field_for_reward_is_reported_before_the_first_step(place: Path) -> None:
    run = launch_experiment(
        place,
        "unscored",
        "reward.function=tests.rewards.foreign_functions:compute_score",
        "dry_run.scale=tiny",
        experiment="tiny_ppo",
    )
    assert run.code == 2
    assert "record lacks field `reward_model.ground_truth` or `answer`" in run.error
