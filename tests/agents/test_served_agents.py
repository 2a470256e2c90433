"""Agents that are written for training run unchanged against `aligner serve-model`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs import REPOSITORY
from tests.agents import crediting_agents, openai_agents
from tests.agents.calling_model import saved
from tests.agents.serving_model import served

KEY = "any"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(saved(tmp_path_factory.mktemp("model"), "qwen")) as url:
        yield url


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    return {"at": 0, "asked": "why 0?", "log": str(tmp_path / "log")}


def test_tool_loop_of_training_runs_against_served_model(url: str, task: dict[str, Any]) -> None:
    asyncio.run(openai_agents.looks(task, url, KEY))
    entries = [json.loads(line) for line in Path(task["log"]).read_text().splitlines()]
    assert len(entries) == 3 and all(entry["logprobs"] for entry in entries)
    # The model was trained to call the tool first: an answer of calls has no text.
    assert entries[0]["text"] is None and entries[1]["text"] is not None


def test_parallel_requests_of_training_run_against_served_model(
    url: str, task: dict[str, Any]
) -> None:
    asyncio.run(openai_agents.branches(task, url, KEY))


def test_text_completions_of_training_run_against_served_model(url: str) -> None:
    openai_agents.steps({"requests": ["1+1=", "1+1=2"], "with": {"max_tokens": 3}}, url, KEY)
    asyncio.run(openai_agents.calculates({"prompt": "2*3=", "answer": "6"}, url, KEY))


def test_credit_of_training_is_accepted_without_effect(url: str, task: dict[str, Any]) -> None:
    asyncio.run(crediting_agents.rewards_each_turn(task, url, KEY))
    asyncio.run(crediting_agents.simulates(task, url, KEY))
    crediting_agents.reports(task, url, KEY)
    answer = crediting_agents.post(
        url, KEY, "completions", {"prompt": "yes"}, **{"X-Aligner-Train": "maybe"}
    )
    assert answer.status == 400 and "X-Aligner-Train" in answer.content["error"]["message"]


def test_command_of_training_runs_against_served_model(url: str, task: dict[str, Any]) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY}
    subprocess.run(
        [sys.executable, "-m", "tests.agents.openai_agents"],
        input=json.dumps(task),
        text=True,
        env=environment,
        cwd=REPOSITORY,
        check=True,
    )
