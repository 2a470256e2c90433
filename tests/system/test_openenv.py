"""Test of a complete run with an environment server of OpenEnv.

The server, and the package of its client, are in their own virtual environment.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.peer_environment import installed_python, site_packages
from benchmarks.runs import REPOSITORY, run_to_end
from tests.agents.calling_model import saved
from tests.worker_pool import free_port

PYTHON, EXAMPLES = installed_python("openenv"), REPOSITORY / "docs" / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        PYTHON is None, reason="not installed: python -m benchmarks.peer_environment openenv"
    ),
]
LEARNED = [(2, 3), (7, 8)]


@pytest.fixture
def url() -> Iterator[str]:
    """URL of a server with the environment of docs/examples/."""
    port = free_port()
    arguments = ["openenv_products:app", "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen([str(PYTHON), "-m", "uvicorn", *arguments], cwd=EXAMPLES)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert server.poll() is None
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.2)
        yield f"ws://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that was trained for a few steps to call the calculator."""
    conversations = [
        [
            {"role": "user", "content": f"{a}*{b}?"},
            {"role": "assistant", "content": f"[{a}*{b}]"},
            {"role": "user", "content": str(a * b)},
            {"role": "assistant", "content": str(a * b)},
        ]
        for a, b in LEARNED
    ]
    directory = tmp_path / "model"
    directory.mkdir()
    return saved(directory, "qwen", conversations, ())


def test_openenv_run_trains_on_server_episodes(
    url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the client runs in the run's environment workers, and needs only this package
    assert PYTHON is not None
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "websockets").symlink_to(Path(site_packages(PYTHON)) / "websockets")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        subprocess.run(
            [str(PYTHON), "openenv_environment.py", url, "text"],
            cwd=EXAMPLES,
            input="".join(f"{json.dumps({'a': a, 'b': b})}\n" for a, b in LEARNED),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    )
    assert "7*8?" in tasks.read_text()
    run = run_to_end(
        tmp_path / "run",
        "algorithm=grpo",
        "model.source=directory",
        f"model.path={model}",
        f"data.path={tasks}",
        "data.max_prompt_tokens=60",
        "environment.target=docs.examples.openenv_environment:OpenEnvEnvironment",
        f"+environment.arguments.url={url}",
        "+environment.arguments.action=text",
        "+environment.arguments.observation=text",
        "environment.max_turn_tokens=16",
        "reward=environment",
        "rollout.max_response_tokens=100",
        "rollout.stop_at_eos=true",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=4",
        "rollout.micro_batches=1",
        "algorithm.minibatches=1",
        "engine.exact=true",
        "evaluation.every=0",
        "logging.samples_every=1",
        "logging.tensorboard=false",
        "run.steps=2",
    )
    assert run.code == 0, run.report()
    assert all(
        step["mismatch/logprob_abs"] == 0 and step["rollout/skipped"] == 0 for step in run.metrics
    )
    assert max(step["reward/mean"] for step in run.metrics) > 0
    turns = [
        turn
        for line in run.paths.samples.read_text().splitlines()
        for turn in json.loads(line).get("turns", [])
    ]
    # the result of the calculator
    assert any("user\n56" in turn.get("environment", "") for turn in turns)
