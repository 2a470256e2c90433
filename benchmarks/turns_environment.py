"""Environment of benchmarks.turns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

TOLD = 8
"""Number of words in an observation."""


class Words:
    """Environment that responds with a few words after a random delay of at most `task["delay_s"]`
    seconds, and ends after `task["turns"]` turns."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self._turns, self._delay_s, self._draw, self._had = (
            task["turns"],
            task["delay_s"],
            random.Random(seed),
            0,
        )
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self._draw.uniform(0.0, self._delay_s))
        self._had += 1
        return (
            " ".join(f"w{self._draw.randrange(3, 500)}" for _ in range(TOLD)),
            1.0,
            self._had == self._turns,
        )
