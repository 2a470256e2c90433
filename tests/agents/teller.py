"""Environments that return the number of turns they have had."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aligner.data.tool_calls import ToolCall, parse_turn


class Teller:
    """Return the number of turns so far, after a delay; end after `turns` turns.

    If the task has `fails`, the second turn raises.
    """

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
    """Answer each turn with a chat message."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    async def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self._had = 0
        return []

    async def step(self, action: str) -> tuple[list[dict[str, str]], float, bool]:
        self._had += 1
        return [{"role": "user", "content": f"n{self._had}"}], 0.5, self._had == self._turns


class Conversant:
    """Answer each turn with the script of its task, as the user or as the result of the turn's tool
    calls."""

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
        who, text = self._script.pop(0)
        calls = [
            call
            for call in parse_turn(action, self._form, self._messages).calls
            if isinstance(call, ToolCall)
        ]
        messages = [call.to_message(text) for call in calls or [ToolCall("000000000", "none", {})]]
        messages = messages if who == "tool" else [{"role": who, "content": text}]
        self._messages += 1 + len(messages)
        return messages, 0.25, False


class Quiet:
    """Answer only every second turn with a text."""

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
    """Return a different answer at each call, so that a repeated episode differs."""

    async def step(self, action: str) -> tuple[str, float, bool]:
        _, reward, done = await super().step(action)
        return f"n{time.monotonic_ns() % 1_000_000:06};", reward, done
