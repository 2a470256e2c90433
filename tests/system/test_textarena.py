"""Test of a complete run with a game of `textarena`, whose packages are in their own virtual
environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_environment import installed_python, site_packages
from benchmarks.runs import REPOSITORY, run_to_end
from tests.agents.calling_model import saved

PYTHON, EXAMPLES = installed_python("textarena"), REPOSITORY / "docs" / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        PYTHON is None, reason="not installed: python -m benchmarks.peer_environment textarena"
    ),
]
GAME = "GuessTheNumber-v0"


def play(question: dict[str, Any], *guesses: int) -> list[dict[str, Any]]:
    """A conversation that plays the game, for the training of the model."""
    messages = [question]
    for guess in guesses:
        messages.append({"role": "assistant", "content": f"[{guess}]"})
        messages.append({"role": "user", "content": "The target number is lower."})
    return messages[:-1]


def test_textarena_run_trains_on_game_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PYTHON is not None
    # the game runs in the run's environment workers
    monkeypatch.setenv("PYTHONPATH", site_packages(PYTHON))
    games = tmp_path / "games.jsonl"
    command = [str(PYTHON), "textarena_game.py", GAME, "4"]
    games.write_bytes(subprocess.run(command, cwd=EXAMPLES, capture_output=True, check=True).stdout)
    (question,) = json.loads(games.read_text().splitlines()[0])["messages"]
    model = tmp_path / "model"
    model.mkdir()
    saved(model, "qwen", [play(question, 12, 6, 3), play(question, 15, 10, 5)], ())
    run = run_to_end(
        tmp_path / "run",
        "algorithm=grpo",
        "model.source=directory",
        f"model.path={model}",
        f"data.path={games}",
        "data.max_prompt_tokens=600",
        "environment.target=docs.examples.textarena_game:TextArenaGame",
        f"+environment.arguments.game={GAME}",
        "environment.max_turn_tokens=8",
        "reward=environment",
        "rollout.max_response_tokens=400",
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
    text = run.paths.samples.read_text()
    assert "The target number is" in text
    assert max(step["reward/mean"] for step in run.metrics) > 0


# Plays Blackjack, which draws cards at each step: alone, and in turn with another game.
INTERLEAVED = """
import asyncio
from textarena_game import TextArenaGame

async def play(*seeds):
    games = [TextArenaGame("Blackjack-v0") for _ in seeds]
    shown = [[game.start(seed)] for game, seed in zip(games, seeds)]
    for _ in range(6):
        for game, texts in zip(games, shown):
            texts.append(await game.step("[Hit]"))
    return shown

(alone,) = asyncio.run(play(3))
assert alone == asyncio.run(play(3, 4))[0] == asyncio.run(play(4, 3))[1]
assert alone != asyncio.run(play(4))[0]
"""


def test_games_in_one_process_do_not_share_random_numbers() -> None:
    subprocess.run([str(PYTHON), "-c", INTERLEAVED], cwd=EXAMPLES, check=True)
