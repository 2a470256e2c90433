"""Tests of complete runs of `tiny_ppo`.

A start takes about 20 s, so the tests share few runs.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from aligner.data.model_directory import check_model_directory
from aligner.errors import RESUMABLE
from aligner.observability.metrics import read_records
from aligner.paths import find_complete_steps
from benchmarks.fault_draws import GROUPS, random_faults
from benchmarks.faults import flip_bit, run_disturbed
from benchmarks.runs import (
    REPOSITORY,
    Finished,
    Launch,
    checkpoint_differences,
    repeatable,
    run_to_end,
)
from tests.observability.traces import checked_trace
from tests.system.conftest import COMPARED, STEPS

pytestmark = pytest.mark.timeout(400)

FAULTS_STEPS, FAULTS_SEED = 24, 0
UPDATED = ("policy/lr", "policy/grad_norm", "policy/entropy", "value/loss", "value/grad_norm")
DOCUMENTED = {
    *(
        "step",
        "reward/mean",
        "reward/std",
        "kl/reference",
        "kl/coef",
        "response/length",
        "response/ended_fraction",
    ),
    *(
        "policy/loss",
        "policy/clip_fraction",
        "policy/approx_kl",
        "policy/ratio_max",
        "policy/entropy",
        "policy/grad_norm",
    ),
    *(
        "policy/lr",
        "value/loss",
        "value/clip_fraction",
        "value/explained_variance",
        "mismatch/logprob_abs",
        "mismatch/kl",
    ),
    *(
        "staleness/mean",
        "staleness/max",
        "time/step",
        "time/generate",
        "time/logprobs",
        "time/server_wait",
        "time/train",
    ),
    *(
        "mismatch/fraction_above_1pct",
        "time/reshard",
        "throughput/samples_per_s",
        "throughput/tokens_per_s",
    ),
}

FROM_THE_NEWEST = (
    "run.resume=auto",
    "checkpoint.every=6",
    "checkpoint.keep=10",
    "run.stop_after=12",
    "logging.tensorboard=false",
    *COMPARED,
)


@pytest.mark.promise("engine-trainer-mismatch-below-1e-3")
def test_policy_learns_and_engine_matches_trainer(undisturbed: Finished) -> None:
    metrics = undisturbed.metrics
    assert [step["step"] for step in metrics] == list(range(1, STEPS + 1))
    assert metrics[0]["reward/mean"] <= 0.2
    assert metrics[-1]["reward/mean"] >= 0.8
    assert max(step["mismatch/logprob_abs"] for step in metrics) < 1e-3
    assert {step["staleness/max"] for step in metrics} == {0.0}
    assert metrics[0]["kl/coef"] != metrics[6]["kl/coef"]


def test_every_documented_metric_is_written_at_every_step(undisturbed: Finished) -> None:
    for step in undisturbed.metrics:
        assert step.keys() >= DOCUMENTED
        assert all(math.isfinite(value) for value in step.values())


def test_run_directory_contains_documented_files(undisturbed: Finished) -> None:
    paths = undisturbed.paths
    assert undisturbed.out.startswith(f"run directory: {paths.root}\n")
    assert paths.config.is_file()
    assert any(paths.tensorboard.glob("events.*"))
    assert {file.name for file in (paths.root / "logs").iterdir()} == {
        *(f"{role}-0.log" for role in ("prepare", "critic", "reward", "trainer")),
        *(f"{role}-triton.log" for role in ("critic", "reward")),
    }
    samples = read_records(paths.samples)
    assert {sample["step"] for sample in samples} == {1, *range(5, STEPS + 1, 5)}
    assert all(sample.keys() == {"step", "prompt", "response", "reward"} for sample in samples)
    for step in (*range(6, STEPS, 6), STEPS):
        assert (paths.checkpoint(step, "policy") / "rank_0.safetensors").is_file()
        assert (paths.checkpoint(step, "critic") / "rank_0.safetensors").is_file()


def test_trace_contains_work_of_every_role_and_step(undisturbed: Finished) -> None:
    trace = checked_trace(undisturbed.paths.trace)
    assert trace.keys() == {"trainer", "critic", "reward"}
    seconds = {
        (event["name"], event["args"]["step"]): event["dur"] / 1e6 for event in trace["trainer"]
    }
    for step in undisturbed.metrics:
        for phase, name in (
            ("generate", "generate"),
            ("logprobs", "logprobs"),
            ("train", "train"),
            ("reshard", "publish"),
        ):
            assert seconds[name, step["step"]] == pytest.approx(step[f"time/{phase}"], abs=1e-5)
    for role, name, rows in (
        ("reward", "score", 64),
        ("critic", "values", 64),
        ("critic", "critic_train", 64),
    ):
        events = [event for event in trace[role] if event["name"] == name]
        computed = {
            step: sum(e["args"]["rows"] for e in events if e["args"]["step"] == step)
            for step in range(1, STEPS + 1)
        }
        assert set(computed.values()) == {rows}, (role, computed)
    policy = {
        event["args"]["step"]: event for event in trace["trainer"] if event["name"] == "train"
    }
    critic = [event for event in trace["critic"] if event["name"] == "critic_train"]
    overlapping = [
        event
        for event in critic
        if event["ts"] < (own := policy[event["args"]["step"]])["ts"] + own["dur"]
    ]
    assert len(overlapping) > len(critic) / 2  # critic and policy train at the same time
    assert {"checkpoint", "wait", "prefill"} <= {event["name"] for event in trace["trainer"]}


def test_report_contains_all_plots(undisturbed: Finished, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    command = [
        sys.executable,
        "-m",
        "aligner",
        "report",
        str(undisturbed.paths.root),
        "--output",
        str(page),
    ]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{page}\n", "")
    plots = {
        "utilization",
        "timeline",
        "reward",
        "kl",
        "length",
        "policy_loss",
        "value_loss",
        "mismatch",
        "staleness",
    }
    assert plots <= set(re.findall(r'"key":"(\w+)"', page.read_text()))


@pytest.mark.slow
def test_trainer_stopped_at_start_runs_no_step(tmp_path: Path) -> None:
    with Launch(tmp_path / "run") as launch:
        launch.wait_for_rank("trainer")
        launch.rank("trainer", 0).send_signal(signal.SIGUSR1)
        stopped = launch.finish(timeout_s=180)
    assert (stopped.code, stopped.metrics) == (RESUMABLE, []), stopped.report()
    assert not stopped.paths.checkpoints.exists()


@pytest.mark.promise("runs-are-reproducible", "resumed-run-equals-uninterrupted")
@pytest.mark.slow
def test_resumed_run_equals_undisturbed_run(undisturbed: Finished, tmp_path: Path) -> None:
    """Until the stop request, the run is also a second run with the same seed.

    Evaluations in this run must not change its training.
    """
    directory = tmp_path / "run"  # the run.name of the undisturbed run, which checkpoints contain
    more = (
        "evaluation.every=1",
        "evaluation.prompts=[hello,xyz]",
        "evaluation.samples=2",
        *COMPARED,
    )
    with Launch(directory, *more) as launch:
        launch.wait_for_step(2)
        launch.interrupt(signal.SIGUSR1)
        stopped = launch.finish(timeout_s=180)
    assert stopped.code == RESUMABLE, stopped.report()
    assert "stopped; resume the run with: aligner launch " in stopped.out
    steps = int(stopped.metrics[-1]["step"])
    assert steps < 6
    # The rest of a grace period is reserved for the checkpoint, so the resumed run evaluates it.
    assert ["eval/score" in record for record in stopped.metrics] == [True] * steps + [False]
    assert repeatable(without_evaluation(stopped.metrics)) == repeatable(
        undisturbed.metrics[:steps]
    )
    assert (stopped.paths.checkpoints / f"step_{steps}" / "manifest.json").is_file()
    resumed = run_to_end(directory, "run.resume=true", "run.stop_after=6", *more)
    assert repeatable(without_evaluation(resumed.metrics)) == repeatable(undisturbed.metrics[:6])
    samples = [sample for sample in read_records(undisturbed.paths.samples) if sample["step"] <= 6]
    assert read_records(resumed.paths.samples) == samples
    for part in ("policy", "critic"):
        assert (resumed.paths.checkpoint(6, part) / "rank_0.safetensors").is_file()
    assert checkpoint_differences(undisturbed.paths, resumed.paths, 6) == []
    evaluated = [record for record in resumed.metrics if "eval/score" in record]
    assert [record["step"] for record in evaluated] == list(range(7))
    assert all(
        record.keys() >= {"eval/pass@2", "eval/win_rate", "eval/reference_perplexity"}
        for record in evaluated
    )
    assert evaluated[0].keys() == {
        "step",
        "time/evaluate",
        *(key for key in evaluated[0] if key.startswith("eval/")),
    }
    assert evaluated[-1]["eval/score"] > evaluated[0]["eval/score"]
    events = checked_trace(resumed.paths.trace)["trainer"]
    assert [event["args"]["step"] for event in events if event["name"] == "train"] == list(
        range(1, 7)
    )


@pytest.mark.promise("resumed-run-equals-uninterrupted")
@pytest.mark.slow
def test_killed_run_resumes_from_timed_checkpoint(undisturbed: Finished, tmp_path: Path) -> None:
    directory, given = (
        tmp_path / "run",
        ("run.resume=auto", "run.stop_after=6", "checkpoint.every_minutes=1e-6", *COMPARED),
    )
    with Launch(directory, *given) as launch:
        launch.wait_for_step(3)
    saved, before = find_complete_steps(launch.paths.checkpoints), launch.paths.metrics.read_text()
    assert saved[-1] >= 1  # complete before the next step's metrics are written
    again = run_to_end(directory, *given)
    assert again.metrics[0] == json.loads(before.splitlines()[0]), (
        "the first step was not done again"
    )
    assert not again.paths.set_aside.exists()
    assert repeatable(again.metrics) == repeatable(undisturbed.metrics[:6])
    assert checkpoint_differences(undisturbed.paths, again.paths, 6) == []
    samples = [sample for sample in read_records(undisturbed.paths.samples) if sample["step"] <= 6]
    assert read_records(again.paths.samples) == samples


def without_evaluation(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the metrics of training steps without evaluation metrics."""
    return [
        {key: value for key, value in step.items() if not key.startswith("eval/")}
        for step in metrics
        if step["step"]
    ]


def copy_stopped_run(undisturbed: Finished, directory: Path, *checkpoints: int) -> Path:
    """Copy the undisturbed run with only these checkpoints, and return their directory.

    Checkpoint 6 also has a backup, with a name that a resumed run must ignore.
    """
    shutil.copytree(
        undisturbed.paths.root,
        directory,
        ignore=shutil.ignore_patterns("checkpoints", "tensorboard", "logs"),
    )
    for step in checkpoints:
        shutil.copytree(
            undisturbed.paths.checkpoints / f"step_{step}",
            directory / "checkpoints" / f"step_{step}",
        )
    (directory / "checkpoints" / "step_6").rename(directory / "checkpoints" / "step_6_backup")
    shutil.copytree(
        directory / "checkpoints" / "step_6_backup", directory / "checkpoints" / "step_6"
    )
    return directory / "checkpoints"


@pytest.mark.promise("damaged-checkpoint-is-never-resumed")
@pytest.mark.slow
def test_run_resumes_from_newest_undamaged_checkpoint(
    undisturbed: Finished, tmp_path: Path
) -> None:
    checkpoints, damaged = (
        copy_stopped_run(undisturbed, tmp_path / "run", 6, 12, 18),
        {
            12: "policy",
            18: "critic",
        },
    )
    for step, part in damaged.items():
        flip_bit(checkpoints / f"step_{step}" / part / "rank_0.safetensors", 0.5, 0)
    run = run_to_end(tmp_path / "run", *FROM_THE_NEWEST)
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics[:12])
    assert checkpoint_differences(undisturbed.paths, run.paths, 12) == []
    log = run.paths.log("trainer", 0).read_text()
    assert "Traceback" not in log and run.out.count("a checkpoint is damaged and was moved to") == 2
    for step, part in damaged.items():
        assert (
            f"{part}/rank_0.safetensors is damaged"
            in (checkpoints / f"step_{step}.damaged" / "damage.txt").read_text()
        )
        assert (
            f"DAMAGED: checkpoint step_{step} is not used" in log
            and f"step_{step}.damaged" in run.out
        )


@pytest.mark.slow
def test_resume_refuses_an_initial_model_with_a_flipped_bit(
    undisturbed: Finished, tmp_path: Path
) -> None:
    copy_stopped_run(undisturbed, tmp_path / "run", 6, 12)
    flip_bit(tmp_path / "run" / "initial_model" / "model.safetensors", 0.5, 0)
    with Launch(tmp_path / "run", *FROM_THE_NEWEST) as launch:
        run = launch.finish(150)
    assert run.code == 1, run.report()
    assert "model.source: model.safetensors: " in run.error, run.report()
    assert "since checkpoint step_12 was saved" in run.error and "Traceback" not in run.error


@pytest.mark.slow
def test_run_with_only_damaged_checkpoints_is_refused(
    undisturbed: Finished, tmp_path: Path
) -> None:
    checkpoints = copy_stopped_run(undisturbed, tmp_path / "run", 6, 12)
    flip_bit(checkpoints / "step_12" / "manifest.json", 0.5, 0)
    flip_bit(checkpoints / "step_6" / "critic" / "updates.json", 0.5, 0)
    with Launch(tmp_path / "run", *FROM_THE_NEWEST) as launch:
        run = launch.finish(150)
    assert run.code == 1, run.report()
    assert "every checkpoint is damaged" in run.error and "Traceback" not in run.error, run.report()
    assert (
        "step_12/manifest.json: damaged" in run.error
        and "step_6: critic/updates.json is damaged" in run.error
    )
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "step_12",
        "step_6",
        "step_6_backup",
    ]
    assert len(run.metrics) == len(undisturbed.metrics)
    json.loads((checkpoints / "step_6" / "manifest.json").read_text())


@pytest.mark.slow
def test_run_resumes_at_another_layout(undisturbed: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    skipped = shutil.ignore_patterns("step_*", "tensorboard", "logs")
    shutil.copytree(undisturbed.paths.root, directory, ignore=skipped)
    shutil.copytree(undisturbed.paths.checkpoints / "step_6", directory / "checkpoints" / "step_6")
    resumed = run_to_end(
        directory,
        *(
            "run.resume=true",
            "run.stop_after=8",
            "logging.tensorboard=false",
            "checkpoint.best_metric=reward/mean",
            *COMPARED,
        ),
        *(
            "actor.parallel.data=2",
            "actor.optimizer.distributed=true",
            "critic.parallel.pipeline=2",
        ),
    )
    assert [step["step"] for step in resumed.metrics] == list(range(1, 9))
    for got, expected in zip(resumed.metrics[6:], undisturbed.metrics[6:8], strict=True):
        assert got["reward/mean"] == expected["reward/mean"]
        for key in (*UPDATED, "kl/reference", "kl/coef"):
            assert got[key] == pytest.approx(expected[key], rel=1e-3), key
    manifest = json.loads((directory / "checkpoints" / "step_8" / "manifest.json").read_text())
    assert manifest["metric"] == {
        "name": "reward/mean",
        "value": resumed.metrics[-1]["reward/mean"],
    }
    assert manifest["config"]["actor"]["parallel"]["data"] == 2
    trace = checked_trace(directory / "trace.json")
    assert {event["tid"] for event in trace["critic"] if event["args"].get("step", 0) > 6} == {0, 1}
    events = [event for event in trace["trainer"] if event["name"] == "train"]
    steps = {
        rank: [event["args"]["step"] for event in events if event["tid"] == rank] for rank in (0, 1)
    }
    # The undisturbed run's events after step 6 were dropped.
    assert steps == {0: list(range(1, 9)), 1: [7, 8]}


def test_converted_policy_is_a_valid_model_directory(undisturbed: Finished, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    command = [
        sys.executable,
        "-m",
        "aligner",
        "convert",
        str(undisturbed.paths.root),
        str(tmp_path / "model"),
    ]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{tmp_path / 'model'}\n", "")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    check_model_directory(tmp_path / "model")


@pytest.mark.promise("deterministic-mode-changes-nothing-on-cpu")
@pytest.mark.slow
def test_deterministic_run_is_equal_on_cpu(undisturbed: Finished, tmp_path: Path) -> None:
    run = run_to_end(tmp_path / "run", "cluster.deterministic=true", "run.stop_after=2", *COMPARED)
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics[:2])


@pytest.mark.promise("first-step-equal-at-another-layout")
@pytest.mark.slow
def test_first_step_is_equal_at_another_layout(undisturbed: Finished, tmp_path: Path) -> None:
    layout = (
        "actor.parallel.tensor=2",
        "actor.parallel.pipeline=2",
        "critic.parallel.tensor=2",
        *COMPARED,
    )
    sharded = run_to_end(tmp_path / "sharded", *layout, "run.stop_after=1")
    expected, got = undisturbed.metrics[0], sharded.metrics[0]
    # Equal rewards show equal samples: a different digit in 64 responses would change the mean.
    assert {key: got[key] for key in ("reward/mean", "reward/std")} == {
        key: expected[key] for key in ("reward/mean", "reward/std")
    }
    for key in (
        "policy/grad_norm",
        "policy/entropy",
        "policy/approx_kl",
        "policy/ratio_max",
        "value/loss",
        "value/grad_norm",
        "kl/reference",
    ):
        assert got[key] == pytest.approx(expected[key], rel=1e-4), key
    # Mean difference per token between the log-probs of the engine and of the trainer.
    assert got["mismatch/logprob_abs"] < 1e-4
    # The loss is a sum of terms of order 1 that nearly cancel.
    assert got["policy/loss"] == pytest.approx(expected["policy/loss"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_separate_generator_equals_colocated_engine(undisturbed: Finished, tmp_path: Path) -> None:
    apart = run_to_end(tmp_path / "run", "engine.placement=server", "run.stop_after=3", *COMPARED)
    assert repeatable(apart.metrics) == repeatable(undisturbed.metrics[:3])
    assert (apart.paths.root / "logs" / "generator-0.log").is_file()


@pytest.mark.slow
def test_killed_servers_keep_the_weights(undisturbed: Finished, tmp_path: Path) -> None:
    # A process that is killed in the last steps may not be restarted before the run ends.
    faults = random_faults(FAULTS_SEED, GROUPS["servers"], FAULTS_STEPS // 2, 0.4, {})
    overrides = (
        f"run.stop_after={FAULTS_STEPS}",
        "checkpoint.every=6",
        "reward.replicas=2",
        "logging.tensorboard=false",
        *COMPARED,
    )
    disturbed = run_disturbed(tmp_path / "run", faults, *overrides)
    run = disturbed.run
    assert run.code == 0, run.report()
    assert disturbed.restarts == len(faults), run.report()
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics[:FAULTS_STEPS])
    assert checkpoint_differences(undisturbed.paths, run.paths, FAULTS_STEPS) == []


def save_reward_model(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(5)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(directory)


@pytest.mark.slow
def test_dapo_run_replaces_prompts_without_critic(
    tmp_path: Path,
) -> None:
    # In the first steps of a random model most scores are 0, so some prompts are replaced.
    overrides = (
        "algorithm=dapo",
        "rollout.max_response_tokens=3",
        "algorithm.minibatches=4",
        "run.steps=2",
    )
    overrides += (
        "algorithm.early_stop_kl=1e-9",
    )  # above the rounding error of an unchanged policy
    finished = run_to_end(tmp_path / "run", *overrides)
    assert [step["step"] for step in finished.metrics] == [1, 2]
    for step in finished.metrics:
        assert not [name for name in step if name.startswith("value/")]
        assert 0 < step["rollout/kept_fraction"] < 1
        # The first minibatch has a KL of 0, because its loss is computed before any update.
        assert step["policy/updates"] == 2
        assert step["policy/grad_norm"] > 0 and step["mismatch/logprob_abs"] < 1e-3
    assert not list((finished.paths.root / "logs").glob("critic*"))
    checkpoint = finished.paths.checkpoints / "step_2"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "manifest.json",
        "pass_rates",
        "policy",
    ]
    state = json.loads((checkpoint / "manifest.json").read_text())["state"]
    assert state["critic_updates"] == 0 and state["position"] > 2 * 16


@pytest.mark.slow
def test_reward_model_scores_equal_transformers(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    directory = tmp_path / "reward_model"
    save_reward_model(directory)
    run = run_to_end(
        tmp_path / "run",
        *(
            "algorithm=rloo",
            "reward.kind=model",
            f"reward.path={directory}",
            "reward.parallel.tensor=2",
            "run.steps=2",
        ),
        *("logging.samples_every=1", "logging.samples_count=64"),
    )
    samples = read_records(run.paths.samples)
    for step in run.metrics:
        rewards = [sample["reward"] for sample in samples if sample["step"] == step["step"]]
        assert len(rewards) == 64
        assert step["reward/mean"] == pytest.approx(sum(rewards) / 64, abs=1e-5)
    model = LlamaForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = Tokenizer.from_file(str(run.paths.initial_model / "tokenizer.json"))
    # Every response has 16 tokens. A text of fewer characters lacks special tokens that were
    # generated.
    whole = [sample for sample in samples if len(sample["response"]) == 16]
    assert len(whole) > 32
    expected = []
    for sample in whole:
        tokens = torch.tensor([tokenizer.encode(sample["prompt"] + sample["response"]).ids])
        with torch.no_grad():
            expected.append(
                float(model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits)
            )
    assert max(expected) - min(expected) > 0.5
    assert [sample["reward"] for sample in whole] == pytest.approx(expected, abs=1e-4)
