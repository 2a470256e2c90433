"""An agent that uses LiteLLM."""

from __future__ import annotations

import json

from litellm import completion
from pydantic import BaseModel
from reporting import calls, read_task, report

NUMBER = {"type": "integer"}
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
        },
    },
}


class Product(BaseModel):
    a: int
    b: int
    product: int


task = read_task()
messages = [{"role": "user", "content": task["asked"]}]
if task["mode"] == "tool":
    while True:
        response = completion(model="openai/policy", messages=messages, tools=[MULTIPLY])
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            calls.append([numbers["a"], numbers["b"]])
            content = str(numbers["a"] * numbers["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    report(task, message.content)
else:
    response = completion(model="openai/policy", messages=messages, response_format=Product)
    report(task, Product.model_validate_json(response.choices[0].message.content))
