"""Train a policy on environment servers of `openenv-core` 0.3.

Write the first observations as prompts, one for each line of `resets.jsonl`, which contains
arguments of the environment's `reset`; then train. `text` is the field of the environment's
actions and observations that the policy writes and reads:

    python openenv_environment.py ws://127.0.0.1:8000 text < resets.jsonl > tasks.jsonl

    environment.target=openenv_environment:OpenEnvEnvironment
    '+environment.arguments={url: "ws://127.0.0.1:8000", action: text, observation: text}'

The client needs only the package `websockets`, because packages that openenv-core requires conflict
with those of aligner. The server can run in its own virtual environment, in a container or on
another machine.
"""

import asyncio
import json
import sys
from typing import Any

import websockets


class OpenEnvEnvironment:
    """Client of an environment server; each episode has its own session on the server.

    An observation is a user message with one field of the server's observation.
    """

    def __init__(self, url: str, action: str, observation: str) -> None:
        """Create a client that is not connected yet.

        Args:
            url: URL of the server, with the scheme `ws` or `wss`.
            action: Field of the server's action that gets the text of a turn.
            observation: Field of the server's observation that the policy reads.
        """
        self._url = f"{url}/ws"
        self._action_field = action
        self._observation_field = observation
        self._connection: websockets.ClientConnection | None = None

    async def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        """Start the episode of a record, whose message is the first observation."""
        await self.start(task["reset"])
        return []

    async def step(self, action: str) -> tuple[list[dict[str, str]], float, bool]:
        """Send a turn as the action."""
        answer = await self._call("step", {self._action_field: action})
        text = str(answer["observation"][self._observation_field])
        messages = [{"role": "user", "content": text}] if text else []
        return messages, float(answer.get("reward") or 0), bool(answer.get("done"))

    async def close(self) -> None:
        """End the session on the server."""
        if self._connection is not None:
            await self._connection.close()

    async def start(self, arguments: dict[str, Any]) -> str:
        """Start an episode, and return its first observation."""
        self._connection = await websockets.connect(self._url, max_size=None)
        answer = await self._call("reset", arguments)
        return str(answer["observation"][self._observation_field])

    async def _call(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and return the data of the answer. Raises RuntimeError for an error."""
        assert self._connection is not None
        await self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._connection.recv())
        if answer["type"] == "error":
            raise RuntimeError(f"{kind}: {answer['data']}")
        result: dict[str, Any] = answer["data"]
        return result


async def write_tasks(url: str, observation: str) -> None:
    """Print one record for each line of standard input."""
    for line in sys.stdin:
        environment = OpenEnvEnvironment(url, "", observation)
        message = {"role": "user", "content": await environment.start(json.loads(line))}
        await environment.close()
        print(json.dumps({"messages": [message], "reset": json.loads(line)}))


if __name__ == "__main__":
    asyncio.run(write_tasks(*sys.argv[1:]))
