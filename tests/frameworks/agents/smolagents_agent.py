"""An agent of smolagents: by default a ToolCallingAgent, with the argument `code` a CodeAgent."""

from __future__ import annotations

import sys

from reporting import API_KEY, BASE_URL, calls, read_task, report
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    calls.append([a, b])
    return a * b


@tool
def final_answer(a: int, b: int, product: int) -> dict[str, int]:
    """Give the final answer.

    Args:
        a: The first factor.
        b: The second factor.
        product: The product of both.
    """
    return {"a": a, "b": b, "product": product}


task = read_task()
model = OpenAIModel(model_id="policy", api_base=BASE_URL, api_key=API_KEY)
options = {"tools": [multiply], "model": model, "max_steps": 3}
if "code" in sys.argv:
    # thought and code of a turn are a JSON object (`response_format`)
    is_structured = task["mode"] == "structured"
    agent = CodeAgent(**options, use_structured_outputs_internally=is_structured)
else:
    if task["mode"] == "structured":
        options["tools"] += [final_answer]  # replaces the tool that answers with a text
    agent = ToolCallingAgent(**options)
report(task, agent.run(task["asked"]))
