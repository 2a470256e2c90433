"""Agents that report rewards and metrics, and send requests that are not trained on."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

from tests.agents.openai_agents import client, log

UNTRAINED = {"X-Aligner-Train": "false"}


@dataclass(frozen=True)
class HttpAnswer:
    """The response to a request."""

    status: int
    content: Any
    """The JSON value of the body."""
    headers: Mapping[str, str]


def post(base_url: str, api_key: str, path: str, body: Any, **headers: str) -> HttpAnswer:
    """Send a JSON value, or bytes, and return the response without checking its status."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"} | headers
    request = urllib.request.Request(f"{base_url}/{path}", content, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return HttpAnswer(answer.status, json.load(answer), answer.headers)
    except urllib.error.HTTPError as error:
        return HttpAnswer(error.code, json.load(error), error.headers)


async def rewards_each_turn(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Reward the turns of four APIs, of parallel branches and of several choices, each with its own
    amount, and log the amounts by the texts of the turns. The episode gets 64 in addition."""
    own = client(base_url, api_key)
    user = {"role": "user", "content": task["asked"]}
    first = await own.chat.completions.create(model="any", messages=[user])
    said = first.choices[0].message.content
    history: list[Any] = [user, {"role": "assistant", "content": said}]

    async def ask(text: str, n: int = 1) -> Any:
        messages = [*history, {"role": "user", "content": text}]
        return await own.chat.completions.create(model="any", messages=messages, n=n)

    choices, branch = await asyncio.gather(ask("one?", n=3), ask("two?"))
    text = await own.completions.create(model="any", prompt="yes 1", max_tokens=5)
    response = await own.responses.create(model="any", input=f"{task['asked']} 2")
    message = await asyncio.to_thread(
        post,
        base_url,
        api_key,
        "messages",
        {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "3"}]},
    )
    rewarded = [
        (first.id, None, said, 1.0),
        (choices.id, 0, choices.choices[0].message.content, 2.0),
        (choices.id, 2, choices.choices[2].message.content, 4.0),
        (branch.id, 0, branch.choices[0].message.content, -8.0),
        (text.id, None, text.choices[0].text, 16.0),
        (response.id, None, response.output_text, 32.0),
        (message.content["id"], None, message.content["content"][0]["text"], 128.0),
    ]
    for completion_id, choice, content, amount in reversed(rewarded):
        body = {"reward": amount, "completion_id": completion_id, "choice": choice}
        # in two parts, which add up
        for part in (0.25, 0.75):
            await own.post("/reward", body=body | {"reward": amount * part}, cast_to=object)
        log(task, {"text": content, "reward": amount})
    await own.post("/reward", body={"reward": 64.0}, cast_to=object)


def reports(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Report rewards and metrics, then fail in the attempts that the task lists."""
    with open(task["log"], "a") as file:  # noqa: PTH123  (an agent as users write them)
        print(task["at"], file=file)
    attempt = Path(task["log"]).read_text().splitlines().count(str(task["at"]))
    own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    completion = own.completions.create(model="any", prompt="yes", max_tokens=3)
    metrics = {"attempts": attempt, f"only/{attempt}": 1.5}
    own.post("/metrics", body={"attempts": 7.0}, cast_to=object)
    own.post("/metrics", body=metrics, cast_to=object)
    if "turn_reward" in task:
        body = {"reward": task["turn_reward"], "completion_id": completion.id}
        own.post("/reward", body=body, cast_to=object)
    if "reward" in task:
        own.post("/reward", body={"reward": task["reward"]}, cast_to=object)
    if attempt in task.get("lost_attempts", []):
        raise ConnectionError("the tool is gone")
    if attempt in task.get("failed_attempts", []):
        raise RuntimeError("the lights are out")


async def simulates(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Alternate turns with answers of a simulated user, which are not trained on, and log them."""
    own = client(base_url, api_key)
    messages: list[Any] = [{"role": "user", "content": task["asked"]}]
    for _ in range(2):
        turn = await own.chat.completions.create(model="any", messages=messages)
        messages.append({"role": "assistant", "content": turn.choices[0].message.content})
        simulated = await own.chat.completions.create(
            model="any",
            messages=messages,
            extra_headers=UNTRAINED,
            **task.get("simulator", {"max_tokens": 12, "temperature": 0.5, "n": 2}),
        )
        contents = [choice.message.content for choice in simulated.choices]
        log(task, {"id": simulated.id, "texts": contents})
        messages.append({"role": "user", "content": contents[0]})
    await own.post("/reward", body={"reward": 1.0}, cast_to=object)


async def misuses(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Send untrained requests in the way of `task["how"]`."""
    own = client(base_url, api_key)
    messages: list[Any] = [{"role": "user", "content": task["asked"]}]

    async def ask(headers: dict[str, str] = UNTRAINED, **arguments: Any) -> Any:
        return await own.chat.completions.create(
            model="any", messages=messages, extra_headers=headers, **arguments
        )

    if task["how"] == "has no turn":
        await ask(max_tokens=4)
        return
    await ask({"X-Aligner-Train": "TRUE"}, max_tokens=4)
    if task["how"] == "loops":
        while True:
            await ask(max_tokens=2)
    if task["how"] == "leaves requests in flight":
        tasks = [asyncio.create_task(ask(headers)) for headers in (UNTRAINED, {})]
        await asyncio.sleep(0.05)
        log(task, {"done": [each.done() for each in tasks]})
        return
    assert task["how"] == "sends invalid requests"
    invalid: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {"X-Aligner-Train": "no"}),
        ({"frequency_penalty": 0.5}, UNTRAINED),
        ({"logprobs": True, "top_logprobs": 2}, UNTRAINED),
        ({"min_tokens": 9, "max_tokens": 2}, UNTRAINED),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, UNTRAINED),
    ]
    for fields, headers in invalid:
        answer = await asyncio.to_thread(
            post,
            base_url,
            api_key,
            "chat/completions",
            {"messages": messages} | fields,
            **headers,
        )
        log(task, {"status": answer.status, "error": answer.content["error"]["message"]})


def identifies(
    task: dict[str, Any], base_url: str, api_key: str, sample_index: int, *, seed: int = -1
) -> None:
    """Log the seed and the index of the parameters, and the headers of responses and errors."""
    answers = [
        post(base_url, api_key, "completions", {"prompt": "yes", "max_tokens": 2}),
        post(base_url, api_key, "completions", b"{"),
        post(base_url, api_key, "nowhere", {}),
        post(base_url, "sk-other", "completions", {"prompt": "yes"}),
    ]
    names = ("x-aligner-seed", "x-aligner-prompt-id", "x-aligner-sample-index")
    headers = [[answer.headers.get(name) for name in names] for answer in answers]
    content = {"parameters": [seed, sample_index], "headers": headers}
    Path(task["log"]).write_text(json.dumps(content))


async def rewards_products(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Reward the first of two answers alone, if it begins with a digit."""
    own = AsyncOpenAI(base_url=base_url, api_key=api_key)
    text = task["prompt"]
    for turn in range(2):
        completion = await own.completions.create(model="policy", prompt=text, max_tokens=2)
        answer = completion.choices[0].text
        if turn == 0:
            body = {"reward": float(answer[:1].isdigit()), "completion_id": completion.id}
            await own.post("/reward", body=body, cast_to=object)
            await own.post("/metrics", body={"digits": float(answer.isdigit())}, cast_to=object)
        text += answer + ";"


def main() -> None:
    """Log the environment variables, and send a request; the entry point of the agent command."""
    task = json.load(sys.stdin)
    OpenAI(max_retries=0).completions.create(model="any", prompt="yes", max_tokens=2)
    names = ("ALIGNER_SEED", "ALIGNER_PROMPT_ID", "ALIGNER_SAMPLE_INDEX")
    Path(task["log"]).write_text(json.dumps([os.environ[name] for name in names]))


if __name__ == "__main__":
    main()
