"""An agent of Pydantic AI with a typed result.

By default the result is the arguments of a tool call; with the argument `native` it is the content
of the response (`response_format`).
"""

from __future__ import annotations

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from reporting import calls, read_task, report


class Product(BaseModel):
    a: int
    b: int
    product: int


task = read_task()
result_type = str
if task["mode"] == "structured":
    result_type = NativeOutput(Product) if "native" in sys.argv else Product
agent = Agent(OpenAIChatModel("policy"), instructions="Be brief.", output_type=result_type)


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    calls.append([a, b])
    return a * b


report(task, agent.run_sync(task["asked"]).output)
