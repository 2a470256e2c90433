"""Environments that say how many turns they have had."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aligner.data.tool_calls import ToolCall, parse_turn


class Teller:
    """Says how many turns it has had, after a while; ends after `turns`, fails at prompts that say
    so."""

    def __init__(self, turns: int = 3, delay_s: float = 0.0, spread: int = 1) -> None:
        self._turns, self._delay_s, self._spread, self._had = turns, delay_s, spread, 0

    async def reset(self, task: dict[str, Any], seed: int) -> str:
        self._fails, self._delay_s = (
            task.get("fails", False),
            self._delay_s * (1 + seed % self._spread),
        )
        return "s"

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self._delay_s)
        self._had += 1
        if self._fails and self._had == 2:
            raise RuntimeError("the lights are out")
        return f"n{self._had};", float(self._had), self._had == self._turns


class Caller:
    """Goes on in chat messages."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    async def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self._had = 0
        return []

    async def step(self, action: str) -> tuple[list[dict[str, str]], float, bool]:
        self._had += 1
        return [{"role": "user", "content": f"n{self._had}"}], 0.5, self._had == self._turns


class Conversant:
    """Says what its task says for each turn, as the user or in answer to the turn's calls."""

    async def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self._script, self._form, self._messages = (
            [*task["script"]],
            task["form"],
            len(task["messages"]),
        )
        return []

    async def step(self, action: str) -> tuple[list[dict[str, str]], float, bool]:
        if not self._script:
            return [], 1.0, True
        who, said = self._script.pop(0)
        calls = [
            call
            for call in parse_turn(action, self._form, self._messages).calls
            if isinstance(call, ToolCall)
        ]
        told = [call.answered(said) for call in calls or [ToolCall("000000000", "none", {})]]
        told = told if who == "tool" else [{"role": who, "content": said}]
        self._messages += 1 + len(told)
        return told, 0.25, False


class Quiet:
    """Says something to every second turn only."""

    async def reset(self, task: dict[str, Any], seed: int) -> str:
        self._had = 0
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        self._had += 1
        return (
            "" if self._had % 2 else f"n{self._had}{action[:1]};",
            0.1 * self._had,
            self._had == 4,
        )


class Fickle(Teller):
    """Never says the same twice."""

    async def step(self, action: str) -> tuple[str, float, bool]:
        _, reward, done = await super().step(action)
        return f"n{time.monotonic_ns() % 1_000_000:06};", reward, done
