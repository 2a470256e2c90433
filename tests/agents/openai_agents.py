"""Agents for the tests, written as users write them: with OpenAI's client only.

Each agent runs in a process that imports this module. An agent in a test module would make
this process import torch and megatron-core too, which takes ten seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def client(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)


def log(task: dict[str, Any], entry: dict[str, Any]) -> None:
    """Append what the agent received to the file `task["log"]`, if the task has one."""
    if "log" in task:
        with open(task["log"], "a") as file:  # noqa: PTH123  (an agent as users write them)
            file.write(json.dumps({"task": task["at"], **entry}) + "\n")


async def reward(base_url: str, api_key: str, value: float) -> None:
    own = client(base_url, api_key)
    await own.post("/reward", body={"reward": value}, cast_to=object)


async def looks(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run a tool loop of three turns, and give reward 0.5."""
    own = client(base_url, api_key)
    messages: list[Any] = [{"role": "user", "content": task["asked"]}]
    for turn in range(3):
        response = await own.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, logprobs=True, temperature=0.3
        )
        choice = response.choices[0]
        log(
            task,
            {
                "text": choice.message.content,
                "logprobs": [each.logprob for each in choice.logprobs.content],
            },
        )
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or []:
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": f"saw {call.function.arguments}",
                }
            )
        if not choice.message.tool_calls:
            messages.append({"role": "user", "content": f"and {turn}?"})
    await reward(base_url, api_key, 0.5)


async def branches(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Send three requests in parallel, in the order of `task["forwards"]`, and continue the last
    one."""
    own = client(base_url, api_key)
    first = [{"role": "user", "content": task["asked"]}]

    async def one(at: int, messages: list[Any], n: int = 1) -> Any:
        await asyncio.sleep(0.15 * (at if task.get("forwards", True) else 2 - at))
        return await own.chat.completions.create(model="any", messages=messages, n=n)

    first_answer = (await one(0, first)).choices[0].message
    history = [*first, {"role": "assistant", "content": first_answer.content}]
    requests = [[*history, {"role": "user", "content": f"so {at}?"}] for at in range(3)]
    responses = await asyncio.gather(*(one(at, requests[at], n=1 + (at == 1)) for at in range(3)))
    last = responses[2].choices[0].message.content
    await one(
        0,
        [*requests[2], {"role": "assistant", "content": last}, {"role": "user", "content": "end"}],
    )


def steps(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Send the task's requests one after another: message lists or texts; a synchronous agent."""
    own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)
    for request in task["requests"]:
        if isinstance(request, str):
            own.completions.create(model="any", prompt=request, **task.get("with", {}))
        else:
            own.chat.completions.create(model="any", messages=request, **task.get("with", {}))


async def misbehaves(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Fail in the way of `task["how"]`."""
    own, messages = client(base_url, api_key), [{"role": "user", "content": task["asked"]}]
    if task["how"] == "silent":
        return
    await own.chat.completions.create(model="any", messages=messages)
    if task["how"] == "raises":
        raise RuntimeError("the lights are out")
    if task["how"] == "dies":
        os._exit(3)
    if task["how"] == "hangs":
        await asyncio.sleep(1000)
    if task["how"] == "computes":
        time.sleep(1000)  # blocks the event loop
    if task["how"] == "recovers":
        if not os.path.exists(task["mark"]):  # noqa: PTH110
            open(task["mark"], "w").close()  # noqa: PTH123
            raise RuntimeError("the first time alone")
        return
    if task["how"] == "endless":
        while True:
            await own.chat.completions.create(model="any", messages=messages)
    if task["how"] == "overflows":
        for _ in range(3):
            messages += [{"role": "user", "content": "x" * 500}]
            response = await own.chat.completions.create(model="any", messages=messages)
            log(
                task,
                {
                    "text": response.choices[0].message.content,
                    "finish": response.choices[0].finish_reason,
                },
            )


async def rewrites(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Return the policy's tool calls with their JSON arguments reformatted."""
    own, messages = client(base_url, api_key), [{"role": "user", "content": task["asked"]}]
    response = await own.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    message = response.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "saw"}]
    await own.chat.completions.create(model="any", messages=messages, tools=TOOLS)


async def answers_in_parallel(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Request equal answers in parallel, log the ids of their calls, and continue one answer with
    ids of the agent's own."""
    own, messages = client(base_url, api_key), [{"role": "user", "content": task["asked"]}]

    async def request(messages: list[Any], n: int) -> list[Any]:
        response = await own.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, n=n
        )
        return [choice.message.model_dump(exclude_none=True) for choice in response.choices]

    responses = await asyncio.gather(*(request(messages, 2) for _ in range(3)))
    answers = [answer for response in responses for answer in response]
    ids = [call["id"] for answer in answers for call in answer.get("tool_calls", [])]
    log(task, {"ids": ids})
    answer = next(answer for answer in answers if "tool_calls" in answer)
    messages.append(answer)
    for place, call in enumerate(answer["tool_calls"]):
        call["id"] = f"call_{place}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "saw"})
    await request(messages, 1)


async def calculates(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Compute the products that the policy requests in brackets, and reward the correct answer."""
    own, text = AsyncOpenAI(base_url=base_url, api_key=api_key), task["prompt"]
    for _ in range(2):
        completion = (
            (await own.completions.create(model="policy", prompt=text, stop="]")).choices[0].text
        )
        if "[" not in completion:
            break
        match = re.fullmatch(r"\[(\d{1,4})\*(\d{1,4})", completion)
        text += completion + (f"]{int(match[1]) * int(match[2])};" if match else "]?;")
    await own.post("/reward", body={"reward": float(completion == task["answer"])}, cast_to=object)


async def calculates_slowly(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run `calculates` slowly, so that episodes are in flight when a test kills a process."""
    await asyncio.sleep(0.1)
    await calculates(task, base_url, api_key)


async def calculates_with_stragglers(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run `calculates`, for a quarter of the tasks after a pause in which the others end."""
    if int(task["answer"]) % 4 == 0:
        await asyncio.sleep(5.0)
    await calculates(task, base_url, api_key)


async def structures(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Send one request with the arguments of the task, and log the answer or the error."""
    own, messages = client(base_url, api_key), [{"role": "user", "content": task["asked"]}]
    try:
        response = await own.chat.completions.create(
            model="any", messages=messages, **task["arguments"]
        )
    except BadRequestError as error:
        log(task, {"error": str(error), "code": error.code})
        await own.chat.completions.create(model="any", messages=messages)
        return
    message = response.choices[0].message
    log(task, message.model_dump())


async def continues(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Request an answer in three parts, then answer it."""
    own = client(base_url, api_key)

    async def ask(messages: list[Any], **fields: Any) -> str:
        response = await own.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, tool_choice="none", extra_body=fields
        )
        return str(response.choices[0].message.content)

    continue_last = {"continue_final_message": True, "add_generation_prompt": False}
    # the model has learned to answer this question
    user = {"role": "user", "content": "why 0?"}
    text = await ask([user], max_tokens=3)
    for limit in (2, 60):
        message = {"role": "assistant", "content": text}
        text += await ask([user, message], max_tokens=limit, **continue_last)
    await ask([user, {"role": "assistant", "content": text}, {"role": "user", "content": "why?"}])


def main() -> None:
    """Run a tool loop with the plain client; the entry point of the agent command."""
    task, own = json.load(sys.stdin), OpenAI(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task["asked"]}]
    for _ in range(2):
        message = (
            own.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            .choices[0]
            .message
        )
        messages.append(message.model_dump())
        for call in message.tool_calls or []:
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": f"saw {call.function.arguments}",
                }
            )
        if not message.tool_calls:
            messages.append({"role": "user", "content": "and?"})


if __name__ == "__main__":
    main()
