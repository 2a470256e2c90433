"""An agent that uses the Responses API with OpenAI's client for Python. The endpoint keeps the
history: each request has only what is new, and the id of the previous response."""

from __future__ import annotations

import json

from openai import OpenAI
from pydantic import BaseModel
from reporting import calls, read_task, report

NUMBER = {"type": "integer"}
MULTIPLY = {
    "type": "function",
    "name": "multiply",
    "description": "Multiply two numbers.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


class Product(BaseModel):
    a: int
    b: int
    product: int


task, client = read_task(), OpenAI()
if task["mode"] == "tool":
    response = client.responses.create(model="policy", input=task["asked"], tools=[MULTIPLY])
    while function_calls := [item for item in response.output if item.type == "function_call"]:
        outputs = []
        for call in function_calls:
            numbers = json.loads(call.arguments)
            calls.append([numbers["a"], numbers["b"]])
            result = str(numbers["a"] * numbers["b"])
            outputs.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
        response = client.responses.create(
            model="policy", input=outputs, tools=[MULTIPLY], previous_response_id=response.id
        )
    report(task, response.output_text)
else:
    response = client.responses.parse(model="policy", input=task["asked"], text_format=Product)
    report(task, response.output_parsed)
