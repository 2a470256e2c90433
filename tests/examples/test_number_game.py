"""The environment and the prompt of `experiment=number_game`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aligner_examples.number_game import NumberGame, prompts

LARGEST = 15


def play_game(
    guess: Callable[[list[str]], str], seed: int, turns: int = 4
) -> tuple[list[str], float]:
    """Play one game; returns the observations and the sum of the rewards."""

    async def play() -> tuple[list[str], float]:
        game, observations, total = NumberGame(LARGEST), [], 0.0
        assert await game.reset({}, seed) == ""
        for _ in range(turns):
            answer, reward, done = await game.step(guess(observations))
            observations.append(answer)
            total += reward
            if done:
                break
        return observations, total

    return asyncio.run(play())


def bisect(observations: list[str]) -> str:
    low, high = 1, LARGEST
    for answer in observations:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if answer.startswith("higher") else (low, middle - 1)
    return f" {(low + high) // 2}\n"


def test_halving_finds_every_number_in_four_turns() -> None:
    assert all(play_game(bisect, seed)[1] == 1.0 for seed in range(60))


def test_seed_determines_the_number() -> None:
    def counting(observations: list[str]) -> str:
        return f"{len(observations) + 1}"

    games = [play_game(counting, seed, LARGEST) for seed in range(60)]
    assert games == [play_game(counting, seed, LARGEST) for seed in range(60)]
    assert {len(observations) for observations, _ in games} == set(range(1, LARGEST + 1))
    assert all(
        observations == ["higher\nGuess:"] * (len(observations) - 1) + [""]
        for observations, _ in games
    )


def test_invalid_guess_gets_a_reminder_and_costs_a_turn() -> None:
    for action in ("", "seven", "-3", "7 8", "9" * 5000, "\N{SUPERSCRIPT TWO}"):
        observations, total = play_game(
            lambda observations, action=action: (
                action if not observations else bisect(observations[1:])
            ),
            3,
            5,
        )
        assert observations[0] == "a number from 1 to 15\nGuess:" and total == 1.0


def test_prompts_are_equal_and_end_with_the_question() -> None:
    shown: list[dict[str, Any]] = list(prompts())
    assert len(shown) > 1 and len({record["prompt"] for record in shown}) == 1
    assert shown[0]["prompt"].endswith("Guess a number from 1 to 15.\nGuess:")
