"""Tests of complete runs that generate samples with vLLM."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from benchmarks.runs import Launch, run_to_end
from tests.engines.vllm.shared_clients import NEEDED

pytestmark = [*NEEDED, pytest.mark.timeout(900)]
GENERATOR = (
    "engine=vllm",
    "engine.placement=server",
    "engine.parallel.data=1",
    "+model.config.head_dim=32",  # the smallest head size that vLLM's attention supports on CPUs
    "logging.tensorboard=false",
    "engine.vllm.timeout_s=400",  # vLLM starts slowly while other tests run
    "server.start_timeout_s=400",
    "server.request_timeout_s=600",
)


def test_vllm_log_probs_equal_trainer_log_probs(
    tmp_path: Path,
) -> None:
    sharding = (
        "actor.parallel.tensor=2",
        "actor.parallel.pipeline=2",
        "engine.publish=changes",
    )
    with Launch(tmp_path / "run", *GENERATOR, *sharding, "run.stop_after=3") as launch:
        run = launch.finish(500)
    assert run.code == 0, run.report()
    assert [step["mismatch/logprob_abs"] < 1e-4 for step in run.metrics] == [True] * 3
    assert run.metrics[-1]["publish/changed"] > 0
    assert [step["verify/logprob_abs"] < 1e-4 for step in run.metrics] == [True] * 3
    assert run.metrics[-1]["policy/grad_norm"] > 0


@pytest.mark.promise("killed-vllm-is-replaced")
def test_killed_vllm_worker_is_replaced(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", *GENERATOR, "run.stop_after=8") as launch:
        launch.wait_for_step(2, timeout_s=300)
        (program,) = (
            each
            for each in launch.rank("generator", 0).children()
            if "serve.py" in " ".join(each.cmdline())
        )
        worker = max(program.children(recursive=True), key=lambda each: each.memory_info().rss)
        assert launch.steps < 8, "it is in the middle"
        worker.kill()
        run = launch.finish(400)
        assert run.code == 0, run.report()
        assert "generator" in "".join(
            line for line in run.out.splitlines() if "; restarting " in line
        ), run.report()
        assert [step["mismatch/logprob_abs"] < 1e-4 for step in run.metrics] == [True] * 8
        assert not program.is_running() or program.status() == psutil.STATUS_ZOMBIE


AGENT = (
    "algorithm=grpo",
    "algorithm.minibatches=1",
    "model.source=random",
    "environment.target=null",
    "environment.agent=tests.agents.openai_agents:calculates",
    "environment.deadline_s=200",
    "reward.function=digit_fraction",
    "rollout.prompts_per_step=8",
    "actor.optimizer.warmup_steps=0",
    "evaluation.every=0",
    "engine=vllm",
    "engine.vllm.timeout_s=400",
    "checkpoint.every=2",
    "logging.samples_every=1",
    "logging.tensorboard=false",
    "run.steps=5",
)


def test_killed_run_of_agent_on_vllm_resumes(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", *AGENT, experiment="calculator") as launch:
        launch.wait_for_step(3, timeout_s=400)
        launch.interrupt(signal.SIGKILL)
        launch.finish(200, orphans_s=60)
        assert launch.processes() == []
    assert launch.steps < 5
    run = run_to_end(
        tmp_path / "run", *AGENT, "run.resume=auto", experiment="calculator", timeout_s=400
    )
    assert run.code == 0, run.report()
    assert [step["step"] for step in run.metrics] == [1, 2, 3, 4, 5]
    assert all(
        step["mismatch/logprob_abs"] < 1e-4 and step["rollout/skipped"] == 0 for step in run.metrics
    )
    assert max(step["episode/turns"] for step in run.metrics) > 1
