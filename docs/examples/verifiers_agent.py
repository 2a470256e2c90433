"""Trains environments that are written for `verifiers` (0.4, its v1 stack), which live in a virtual
environment of their own.

With the Python of that, `verifiers_agent.py tasks TASKSET > tasks.jsonl` makes prompts of a
taskset's tasks. A taskset is a module that is installed there, or lies beside this file.

`run` is the agent, `environment.agent=verifiers_agent:run`, and imports nothing of verifiers: it
starts this file with the interpreter VERIFIERS_PYTHON, once in each process of
`environment.workers`, for the taskset VERIFIERS_TASKSET, and passes it episodes, a line of JSON
each. They share that process, which takes seconds to start, and the tool servers of the taskset.
"""

import asyncio
import itertools
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 26
"""Of a line, which has all of a task."""
MOST_TOLD = 2000
"""Characters of what went wrong."""


class VerifiersProcess:
    """The process of verifiers, started for the first episode, and what it is asked for."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[None]] = {}

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> None:
        """An episode, to its end. Raises RuntimeError where it fails; cancelled, it is ended there
        too."""
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._start()
        number, end = next(self._numbers), asyncio.get_running_loop().create_future()
        self._ends[number] = end
        try:
            self._tell(
                {
                    "number": number,
                    "task": task["verifiers"],
                    "base_url": base_url,
                    "api_key": api_key,
                }
            )
            await end
        except asyncio.CancelledError:
            self._tell({"number": number})
            raise
        finally:
            del self._ends[number]

    async def _start(self) -> None:
        command = (
            os.environ["VERIFIERS_PYTHON"],
            __file__,
            "serve",
            os.environ["VERIFIERS_TASKSET"],
        )
        # the run's are for its own Python
        pipe, paths = asyncio.subprocess.PIPE, {"PYTHONPATH": str(Path(__file__).parent)}
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=os.environ | paths
        )
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            answer = json.loads(line)
            if (end := self._ends.get(answer["number"])) is not None and not end.done():
                (
                    end.set_exception(RuntimeError(answer["problem"]))
                    if answer["problem"]
                    else end.set_result(None)
                )
        code = await process.wait()
        for end in self._ends.values():
            if not end.done():
                end.set_exception(
                    RuntimeError(f"the process of verifiers has ended with code {code}")
                )

    def _tell(self, content: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(content).encode() + b"\n")


run = VerifiersProcess().run


def environment(taskset: str) -> Any:
    """The environment of a taskset, run on this machine: with its own harness, or a loop that has
    its tools alone."""
    import verifiers.v1 as vf

    # "bash" where it has none, which would run the policy's commands here
    own = vf.default_harness_id(taskset)
    # and "max_turns", …
    agent = {"harness": {"id": "null" if own == "bash" else own}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))


async def episode(env: Any, asked: dict[str, Any]) -> None:
    """Run the one that a line asks for, and post its reward. Raises RuntimeError where it has
    failed."""
    import verifiers.v1 as vf

    task_type = type(env.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(asked["task"]), env.taskset.config.task)
    # verifiers reads keys from its environment alone
    key_name = f"EPISODE_{asked['number']}_API_KEY"
    os.environ[key_name] = asked["api_key"]
    client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=key_name)
    try:
        found = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    finally:
        del os.environ[key_name]
    if not found.ok:
        errors = [*found.errors, *(error for trace in found.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    await asyncio.to_thread(post_reward, asked, sum(trace.reward for trace in found.traces))


def post_reward(asked: dict[str, Any], reward: float) -> None:
    """Tell the run what an episode is worth."""
    headers = {"Authorization": f"Bearer {asked['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{asked['base_url']}/reward", json.dumps({"reward": reward}).encode(), headers
    )
    urllib.request.urlopen(request, timeout=30).close()


async def serve(taskset: str) -> None:
    """Run the episodes that lines ask for, until there are no more lines."""
    env, running = environment(taskset), dict[int, asyncio.Task[None]]()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no answer

    async def answered(asked: dict[str, Any]) -> None:
        problem = None
        try:
            await episode(env, asked)
        except Exception as error:  # the environment is the user's, and fails in its own ways
            problem = f"{type(error).__name__}: {error}"[:MOST_TOLD]
        finally:
            running.pop(asked["number"], None)
        print(json.dumps({"number": asked["number"], "problem": problem}), file=answers, flush=True)

    lines = asyncio.StreamReader(limit=MOST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    # Not `env.serving()`: it would keep a client for every address, of which each episode has one,
    # until its end. So each rollout has a server of its own between harness and endpoint, and
    # closes both.
    async with env.shared_tools() as env._shared_tools:
        await env.start()
        async for line in lines:
            asked = json.loads(line)
            if "task" not in asked:
                if (late := running.pop(asked["number"], None)) is not None:
                    late.cancel()
                continue
            running[asked["number"]] = asyncio.create_task(answered(asked))
        for work in running.values():
            work.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        await env.stop()


def main() -> None:
    """What verifiers' own interpreter runs."""
    what, taskset = sys.argv[1:]
    if what == "serve":
        asyncio.run(serve(taskset))
        return
    for task in environment(taskset).taskset:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        print(json.dumps({"prompt": task.data.prompt_text, "verifiers": data}))


if __name__ == "__main__":
    main()
