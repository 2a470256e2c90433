"""The environment and the data of `experiment=calculator`."""

from __future__ import annotations

import asyncio

import pytest

from aligner_examples import calculator


@pytest.mark.parametrize(
    ("action", "result"),
    [
        ("[47*83]", ("3901;", 0.0, False)),
        ("[47+83]", ("?;", 0.0, False)),
        ("[47*]", ("?;", 0.0, False)),
        ("[12345*2]", ("?;", 0.0, False)),
        ("3901", ("", 1.0, True)),
        (" 3901\n", ("", 1.0, True)),
        ("3900", ("", 0.0, True)),
        ("", ("", 0.0, True)),
    ],
)
def test_calculator_answers_calls_and_scores_answers(
    action: str, result: tuple[str, float, bool]
) -> None:
    async def step() -> tuple[str, float, bool]:
        environment = calculator.Calculator()
        assert await environment.reset({"prompt": "47*83=", "answer": "3901"}, seed=0) == ""
        return await environment.step(action)

    assert asyncio.run(step()) == result


def test_held_out_products_are_not_in_the_training_data() -> None:
    training = {record["prompt"] for record in calculator.prompts()}
    held_out = {record["prompt"] for record in calculator.held_out()}
    assert len(held_out) == 512 and len(training | held_out) == 90 * 90
    for record in calculator.demonstrations():
        assert record["prompt"].partition("=")[0] + "=" in training


def test_demonstrations_contain_few_calls() -> None:
    first_turns = [
        record["response"]
        for record in calculator.demonstrations()
        if record["prompt"].endswith("=")
    ]
    calls = sum(response.startswith("[") for response in first_turns)
    assert 0.03 < calls / len(first_turns) < 0.05
