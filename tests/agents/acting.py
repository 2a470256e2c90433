"""Environments for tests, and a process that runs a pool: `python -m tests.agents.acting
DIRECTORY STEPS`."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_journal import EpisodeJournal
from aligner.schema.environment import EnvironmentConfig


class Told:
    """An environment that executes its actions, and appends a line to `log` for each call."""

    def __init__(self, log: str) -> None:
        self.log, self.name, self.draws = Path(log), "", random.Random()

    def _note(self, what: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{self.name} {os.getpid()} {what}\n")

    async def reset(self, task: dict[str, Any], seed: int) -> Any:
        self.name, self.draws = task["name"], random.Random(seed)
        self._note("reset")
        return eval(task.get("first", "f'go, {self.name}'"))

    async def step(self, action: str) -> Any:
        self._note(action)
        kind, _, rest = action.partition(" ")
        drawn = self.draws.random()
        if kind == "once":
            marker, _, rest = rest.partition(" ")
            if Path(marker).exists():
                return f"then {drawn}", drawn, False
            Path(marker).touch()
            return await self.step(rest)
        if kind == "answer":
            return eval(rest)
        if kind == "sleep":
            await asyncio.sleep(float(rest))
        elif kind == "deaf":
            while True:
                try:
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    self._note("cancelled")
        elif kind == "task":
            await asyncio.wait_for(self.step(rest), 60)
        elif kind == "thread":
            await asyncio.to_thread(time.sleep, float(rest))
        else:
            self._at_once(kind)
        return f"{action}: {drawn}", drawn, action == "done"

    def _at_once(self, kind: str) -> None:
        if kind == "hang":
            while True:
                pass
        elif kind == "hold":
            re.match(r"(a+)+$", "a" * 60 + "b")  # runs for ages and holds the GIL
        elif kind == "die":
            os._exit(3)
        elif kind == "exit":
            sys.exit("enough")
        elif kind == "raise":
            raise ValueError("nobody is in")
        elif kind == "memory":
            bytearray(2**32)
        elif kind == "child":
            self._note(f"child {subprocess.Popen(['sleep', '1000']).pid}")
        elif kind == "print":
            print("this is no answer")

    async def close(self) -> None:
        self._note("close")


class Plain(Told):
    """Like Told, with a `step` that is not a coroutine."""

    def step(self, action: str) -> Any:  # type: ignore[override]
        return action, 0.0, False


class NoStep:
    async def reset(self, task: dict[str, Any], seed: int) -> str:
        return ""


NOTHING = None


def pool_of(
    log: Path, kind: str = "Told", journal: EpisodeJournal | None = None, **settings: Any
) -> EnvironmentPool:
    chosen = {
        "episodes_per_worker": 8,
        "deadline_s": 20.0,
        "retries": 0,
        "max_characters": 1000,
    } | settings
    return EnvironmentPool(
        f"{__name__}:{kind}", {"log": str(log)}, EnvironmentConfig(**chosen), journal
    )


def hold_a_pool(directory: Path, steps: int) -> None:
    """Run three episodes with this number of steps, print their outcomes, and hold the pool."""
    pool = pool_of(directory / "log", workers=2, journal=EpisodeJournal(directory / "journal"))
    pool.start()
    names = ["a", "b", "c"]
    first = [pool.reset(name, {"name": name}, seed) for seed, name in enumerate(names)]
    print(*(answer.result() for answer in first), sep="\n")
    for step in range(steps):
        print(
            *(answer.result() for answer in [pool.step(name, f"say {step}") for name in names]),
            sep="\n",
        )
    pool.step("a", "child").result()
    pool.step("b", "hang")
    pool.step("c", "hold")
    time.sleep(0.2)
    print("held", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    from tests.agents import acting  # under the name that the workers import

    acting.hold_a_pool(Path(sys.argv[1]), int(sys.argv[2]))
