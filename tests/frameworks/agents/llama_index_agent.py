"""An agent of LlamaIndex."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from reporting import API_KEY, BASE_URL, calls, read_task, report


class Product(BaseModel):
    """A product of two numbers."""

    a: int
    b: int
    product: int


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    calls.append([a, b])
    return a * b


async def run(task: dict[str, Any]) -> Any:
    llm = OpenAILike(
        model="policy",
        api_base=BASE_URL,
        api_key=API_KEY,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    if task["mode"] == "tool":
        agent = FunctionAgent(tools=[multiply], llm=llm, system_prompt="Be brief.")
        return str(await agent.run(task["asked"]))
    return (await llm.as_structured_llm(Product).acomplete(task["asked"])).raw


task = read_task()
report(task, asyncio.run(run(task)))
