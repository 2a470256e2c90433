"""An agent that uses OpenAI's client for Python."""

from __future__ import annotations

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel
from reporting import calls, read_task, report


class Multiply(BaseModel):
    """Multiply two numbers."""

    a: int
    b: int


class Product(BaseModel):
    a: int
    b: int
    product: int


task, client = read_task(), OpenAI()
messages = [{"role": "user", "content": task["asked"]}]
if task["mode"] == "tool":
    tools = [pydantic_function_tool(Multiply, name="multiply")]
    while True:
        completion = client.chat.completions.parse(model="policy", messages=messages, tools=tools)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            numbers = call.function.parsed_arguments
            calls.append([numbers.a, numbers.b])
            content = str(numbers.a * numbers.b)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    report(task, message.content)
else:
    completion = client.chat.completions.parse(
        model="policy", messages=messages, response_format=Product
    )
    report(task, completion.choices[0].message.parsed)
