"""An agent of the OpenAI Agents SDK: by default with the Responses API, with the argument `chat`
with chat completions, with the argument `stream` with streamed responses."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from pydantic import BaseModel
from reporting import calls, read_task, report


class Product(BaseModel):
    a: int
    b: int
    product: int


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    calls.append([a, b])
    return a * b


async def run(agent: Agent, question: str) -> Any:
    if "stream" not in sys.argv:
        return (await Runner.run(agent, question)).final_output
    streamed = Runner.run_streamed(agent, question)
    async for _ in streamed.stream_events():
        pass
    return streamed.final_output


set_tracing_disabled(True)  # traces would be sent to OpenAI
if "chat" in sys.argv:
    set_default_openai_api("chat_completions")
task = read_task()
if task["mode"] == "tool":
    agent = Agent(name="solver", instructions="Be brief.", model="policy", tools=[multiply])
else:
    agent = Agent(name="solver", instructions="Be brief.", model="policy", output_type=Product)
report(task, asyncio.run(run(agent, task["asked"])))
