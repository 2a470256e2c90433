"""A multi-turn agent for `benchmarks.outcomes`: a calculator called through the OpenAI client."""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

_MAX_TURNS = 3


async def run(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run one episode of `experiment=calculator`.

    Args:
        task: A record of the data; `prompt` is the question and `answer` the expected answer.
        base_url: The episode's OpenAI-compatible endpoint.
        api_key: The episode's key.
    """
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)
    text, turn = task["prompt"], ""

    for _ in range(_MAX_TURNS):
        completion = await client.completions.create(model="policy", prompt=text, stop="]")
        turn = completion.choices[0].text
        if "[" not in turn:
            break
        call = re.fullmatch(r"\[(\d{1,4})\*(\d{1,4})", turn)
        product = str(int(call[1]) * int(call[2])) if call else "?"
        text += f"{turn}]{product};"

    reward = float(turn == task["answer"])
    await client.post("/reward", body={"reward": reward}, cast_to=object)
