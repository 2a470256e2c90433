"""An agent of LangChain, which runs as a graph of LangGraph.

By default the structured result is the arguments of a tool call; with the argument `provider` it is
the content of the response (`response_format`).
"""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from reporting import calls, read_task, report


class Product(BaseModel):
    """A product of two numbers."""

    a: int
    b: int
    product: int


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    calls.append([a, b])
    return a * b


task = read_task()
model = ChatOpenAI(model="policy")
question = {"messages": [{"role": "user", "content": task["asked"]}]}
if task["mode"] == "tool":
    agent = create_agent(model, tools=[multiply], system_prompt="Be brief.")
    report(task, agent.invoke(question)["messages"][-1].content)
else:
    result_format = ProviderStrategy(Product) if "provider" in sys.argv else Product
    agent = create_agent(model, tools=[multiply], response_format=result_format)
    report(task, agent.invoke(question)["structured_response"])
