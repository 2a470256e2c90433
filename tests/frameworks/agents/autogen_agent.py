"""An agent of AutoGen: by default it calls tools until it has a result; with the argument `reflect`
it calls tools once, and then requests a text without tools."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel
from reporting import API_KEY, BASE_URL, calls, read_task, report


class Product(BaseModel):
    a: int
    b: int
    product: int


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    calls.append([a, b])
    return a * b


async def run(task: dict[str, Any]) -> Any:
    info = ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        family=ModelFamily.UNKNOWN,
        structured_output=True,
    )
    client = OpenAIChatCompletionClient(
        model="policy", base_url=BASE_URL, api_key=API_KEY, model_info=info
    )
    if task["mode"] == "tool":
        loop = (
            {"reflect_on_tool_use": True} if "reflect" in sys.argv else {"max_tool_iterations": 3}
        )
        agent = AssistantAgent("solver", client, tools=[multiply], **loop)
    else:
        agent = AssistantAgent("solver", client, output_content_type=Product)
    result = await agent.run(task=task["asked"])
    return result.messages[-1].content


task = read_task()
report(task, asyncio.run(run(task)))
