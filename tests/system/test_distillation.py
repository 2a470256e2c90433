"""Tests of complete runs with a teacher, and of their resume from a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import pytest

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from benchmarks.runs import checkpoint_differences, repeatable, run_to_end

pytestmark = pytest.mark.timeout(400)

ALONE = "algorithm=on_policy_distillation"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with another seed than the policy, and more confident predictions."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    return prepare_model(
        compose_config(
            ["experiment=tiny_ppo", f"run.dir={run}", "seed=7", "model.initializer_std=0.15"]
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "learned", [(), ("teacher.loss=jensen_shannon", "teacher.top_k=16", "teacher.weight=4")]
)
def test_policy_approaches_teacher_without_reward(
    tmp_path: Path, teacher: Path, learned: tuple[str, ...]
) -> None:
    more = ("run.steps=25", "rollout.micro_batches=2", *learned)
    run = run_to_end(tmp_path / "run", ALONE, f"teacher.path={teacher}", *more)
    apart = [
        step["policy/teacher_divergence" if learned else "distill/reverse_kl"]
        for step in run.metrics
    ]
    assert min(apart) > 0 and fmean(apart[-5:]) < 0.9 * fmean(apart[:4])
    assert all(step["policy/grad_norm"] > 0 for step in run.metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
    "learned",
    [(), ("teacher.loss=forward_kl", "teacher.parallel.tensor=2", "algorithm.minibatches=1")],
)
def test_policy_as_its_own_teacher_learns_nothing(tmp_path: Path, learned: tuple[str, ...]) -> None:
    """The teacher's log-probs equal the policy's, so losses and rewards are 0."""
    directory = tmp_path / "run"
    more = (
        f"teacher.path={directory / 'initial_model'}",
        "run.steps=1",
        "actor.optimizer.clip_grad_norm=0",
    )
    run = run_to_end(directory, ALONE, *more, *learned)
    (step,) = run.metrics
    assert abs(step.get("policy/teacher_divergence", 0.0)) < 1e-6
    assert (
        abs(step["distill/reverse_kl"]) < 1e-5 and abs(step["distill/response_reverse_kl"]) < 1e-4
    )
    assert step["policy/grad_norm"] < 1e-4
    logs = {file.name for file in (run.paths.root / "logs").iterdir()}
    assert {"teacher-0.log", "teacher-triton.log"} <= logs and "critic-0.log" not in logs


@pytest.mark.slow
@pytest.mark.parametrize("learned", [(), ("teacher.loss=reverse_kl", "teacher.top_k=8")])
def test_resumed_async_distillation_equals_undisturbed(
    tmp_path: Path, teacher: Path, learned: tuple[str, ...]
) -> None:
    settings = (
        *(
            "algorithm=grpo",
            f"teacher.path={teacher}",
            "teacher.weight=0.1",
            "teacher.replicas=2",
            "run.name=taught",
        ),
        *learned,
        *(
            "engine.placement=server",
            "rollout.max_staleness=1",
            "algorithm.truncated_importance=token",
            "run.steps=4",
        ),
        *(
            "actor.optimizer.warmup_steps=2",
            "checkpoint.every=2",
            "checkpoint.keep=4",
            "logging.tensorboard=false",
        ),
    )
    whole = run_to_end(tmp_path / "whole", *settings, timeout_s=300)
    shutil.copytree(
        whole.paths.root, tmp_path / "parts", ignore=shutil.ignore_patterns("step_4", "logs")
    )
    resumed = run_to_end(tmp_path / "parts", *settings, "run.resume=true", timeout_s=300)
    assert all("distill/reverse_kl" in step and "reward/mean" in step for step in whole.metrics)
    assert repeatable(resumed.metrics) == repeatable(whole.metrics)
    assert checkpoint_differences(whole.paths, resumed.paths, 4) == []


@pytest.mark.slow
def test_student_learns_from_stored_log_probs(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KL on held-out rows decreases, without a running teacher or an engine."""
    data = tmp_path / "answers.jsonl"
    data.write_text(
        "".join(
            f'{{"prompt": "{one}+{two}", "response": "={one + two}"}}\n'
            for one in range(9)
            for two in range(8)
        )
    )
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    lengths = f"{{path: {data}, max_prompt_tokens: 3, max_response_tokens: 4, prompts: []}}"
    (tmp_path / "conf" / "experiment" / "scored.yaml").write_text(
        "# @package _global_\ndefaults: [tiny_ppo, override /algorithm: teacher_scores]\nrun:"
        f" {{steps: 3}}\nmodel: {{source: directory, path: {teacher}}}\ndata: {lengths}\nteacher:"
        " {top_k: 64}\n"
    )
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    run = run_to_end(
        tmp_path / "run",
        *(
            "algorithm=sft",
            f"data.path={data}",
            "data.max_prompt_tokens=3",
            "data.max_response_tokens=4",
        ),
        *(
            "teacher.scores=experiment:scored",
            "teacher.loss=forward_kl",
            f"--config-dir={tmp_path / 'conf'}",
        ),
        *("data.batch_size=16", "data.held_out=16", "evaluation.every=10", "run.steps=40"),
        *("actor.optimizer.learning_rate=3e-3", "logging.tensorboard=false"),
    )
    first, last = run.metrics[0], run.metrics[-1]
    assert 0 < last["eval/teacher_divergence"] < 0.6 * first["sft/teacher_divergence"]
    assert last["eval/loss"] == pytest.approx(last["eval/teacher_divergence"])
    assert {path.name for path in (run.paths.root / "logs").iterdir()} == {
        "prepare-0.log",
        "trainer-0.log",
    }
