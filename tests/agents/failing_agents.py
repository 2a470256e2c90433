"""Agents that fail in the way of their task, as a function and as a command."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

from openai import AsyncOpenAI, OpenAI

from aligner.agents.failures import InfrastructureError
from tests.agents.openai_agents import TOOLS


def fails(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Fail as `task["how"]` says; append a line to the file `task["log"]` for each attempt."""
    with open(task["log"], "a") as file:  # noqa: PTH123  (an agent as users write them)
        print(task["how"], file=file)
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    how = task["how"]
    if how == "fails before its first request":
        raise KeyError("answer")
    if how == "sends no request":
        return
    client.completions.create(model="any", prompt="yes", max_tokens=3)
    if how == "gets a server error":
        # more tokens than the model has positions
        client.completions.create(model="any", prompt=[5] * 1200, max_tokens=3)
    if how == "reports a reward, and raises":
        client.post("/reward", body={"reward": 0.25}, cast_to=object)
    if how == "reaches no tool":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port))
    if how == "has no sandbox":
        raise InfrastructureError("the sandbox does not start")
    if how == "exits":
        sys.exit(int(task["code"]))
    if how != "ends":
        raise RuntimeError("the lights are out")


async def crashes(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Receive a completion, then end the worker process, or hang."""
    own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    await asyncio.to_thread(own.completions.create, model="any", prompt="yes", max_tokens=3)
    if task["how"] == "crashes":
        os._exit(3)
    await asyncio.sleep(1000)


async def uses_tools(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run the tool that the policy calls; an unknown tool raises KeyError. A call earns 1."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    functions = {"look": lambda at: f"saw {at}"}
    response = await client.chat.completions.create(
        model="policy", messages=task["messages"], tools=TOOLS
    )
    calls = response.choices[0].message.tool_calls or []
    for call in calls:
        functions[call.function.name](**json.loads(call.function.arguments))
    await client.post("/reward", body={"reward": float(bool(calls))}, cast_to=object)


def main() -> None:
    """Run `fails` with the endpoint of the environment variables."""
    fails(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])


if __name__ == "__main__":
    main()
