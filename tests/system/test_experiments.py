"""Whole chains of experiments: pairs are sampled, a reward model learns from them, a policy is
trained against it; and rounds of one that learns from what the round before has drawn."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from aligner.config.compose import load_config
from aligner.data.export import find_source
from aligner.models.model_source import read_normalization
from aligner.observability.metrics import read_metrics, read_records
from aligner.paths import RunPaths
from aligner.rewards.scorers import ScoringRequest, digit_fraction
from benchmarks.runs import Finished, repeatable, run_to_end

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
actor: {{optimizer: {{warmup_steps: 2}}}}  # which nothing reads
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
seed: ${{run.round}}
run: {{steps: 1}}
model: {{previous_round: "experiment:better"}}
algorithm: {{pairs: none, responses: best, min_score: 0.01}}
{SAMPLING}
logging: {{tensorboard: false}}
"""
    ),
    "better": (
        """
defaults: [override /algorithm: sft]
run: {steps: 2}
model: {previous_round: "experiment:better"}
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


def test_one_launch_runs_the_whole_chain(chain: Finished, place: Path) -> None:
    firsts = [
        line.split()[2] for line in chain.out.splitlines() if line.startswith("first: experiment ")
    ]
    assert firsts == ["pairs", "judge"]
    assert len(chain.metrics) == 2
    assert {
        entry.name.partition("-")[0] for entry in (place / "cache" / "experiments").iterdir()
    } == {"pairs", "judge"}


def test_pairs_are_the_best_and_the_worst_of_each_prompts_samples(
    chain: Finished, place: Path
) -> None:
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


def test_the_reward_model_is_cut_to_its_layers_and_normalized(chain: Finished, place: Path) -> None:
    result = cached(place, "judge") / "result"
    assert json.loads((result / "config.json").read_text())["num_hidden_layers"] == 2
    assert find_source(result).head == "scalar"
    gain, bias = read_normalization(result)
    assert (gain, bias) != (1.0, 0.0)
    assert not (cached(place, "judge") / "run" / "checkpoints").exists()


def test_killed_sampling_goes_on_where_it_was(chain: Finished, place: Path) -> None:
    entry, run = cached(place, "pairs"), RunPaths(place / "killed")
    shutil.copytree(entry / "run", run.root)
    for file in (run.preferences, run.responses):
        whole = file.stat().st_size
        # The third step's records were being written.
        os.truncate(file.rename(file.with_name(f"{file.name}.unfinished")), whole - 5)
    steps = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(steps[:2]))
    resumed = run_to_end(
        run.root, "--config-dir", str(place / "conf"), "run.resume=true", experiment="pairs"
    )
    for file in (run.preferences, run.responses):
        assert file.read_text() == (entry / "result" / file.name).read_text()
    assert repeatable(resumed.metrics) == repeatable([json.loads(step) for step in steps])


def test_a_round_draws_with_what_has_learned_from_the_round_before(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", str(place / "rounds"))
    run = run_to_end(
        place / "second", f"--config-dir={place / 'conf'}", "run.round=2", experiment="own"
    )
    firsts = [
        line.split()[2] for line in run.out.splitlines() if line.startswith("first: experiment ")
    ]
    assert firsts == ["own@1", "better@1"]
    made = {
        entry.name.rpartition("-")[0]: entry
        for entry in (place / "rounds" / "experiments").iterdir()
    }
    assert sorted(made) == ["better-round1", "own-round1"]
    assert load_config(place / "second" / "config.yaml").model.path == str(
        made["better-round1"] / "result"
    )
    for directory in (made["own-round1"] / "result", place / "second"):
        drawn = read_records(directory / "responses.jsonl")
        assert 0 < len(drawn) <= 8 and min(each["reward"] for each in drawn) >= 0.01
        assert not (directory / "preferences.jsonl").exists()
