"""An agent that uses Anthropic's client; with the argument `stream` with streamed messages."""

from __future__ import annotations

import sys

from anthropic import Anthropic
from pydantic import BaseModel
from reporting import calls, read_task, report

NUMBER = {"type": "integer"}
MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
    },
}


class Product(BaseModel):
    a: int
    b: int
    product: int


task = read_task()
client = Anthropic()
messages = [{"role": "user", "content": task["asked"]}]
options = {"model": "policy", "max_tokens": 100, "system": "Be brief.", "messages": messages}
if task["mode"] == "tool":
    while True:
        if "stream" in sys.argv:
            with client.messages.stream(**options, tools=[MULTIPLY]) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options, tools=[MULTIPLY])
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = []
        for block in message.content:
            if block.type == "tool_use":
                a, b = block.input["a"], block.input["b"]
                calls.append([a, b])
                results.append(
                    {"type": "tool_result", "tool_use_id": block.id, "content": str(a * b)}
                )
        messages.append({"role": "user", "content": results})
    report(task, message.content[0].text)
else:
    message = client.messages.parse(**options, output_format=Product)
    report(task, message.parsed_output)
