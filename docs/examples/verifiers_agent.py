"""Train a policy on environments of `verifiers` 0.4 (its v1 API) in a separate virtual environment.

Run this file with the Python of that virtual environment to write a taskset's tasks as prompts:

    verifiers_agent.py tasks TASKSET > tasks.jsonl

TASKSET is a module that is installed there or is in the directory of this file.

`run` is the agent: set `environment.agent=verifiers_agent:run`. It does not import verifiers.
Instead, each process of `environment.workers` starts this file once with the interpreter
VERIFIERS_PYTHON for the taskset VERIFIERS_TASKSET, and sends it episodes as lines of JSON. All
episodes of a worker share this process, which takes seconds to start, and the tool servers of the
taskset.
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
"""Maximum size of a line, which contains a whole task."""
MOST_TOLD = 2000
"""Maximum length of an error message in characters."""


class VerifiersProcess:
    """Client of the verifiers process: starts it for the first episode and sends it episodes."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[None]] = {}

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> None:
        """Run an episode and return when it is complete.

        If this call is canceled, the verifiers process cancels the episode too.

        Args:
            task: Record of the prompt; its field `verifiers` is the task of the taskset.
            base_url: Address of the OpenAI-compatible endpoint of this episode.
            api_key: API key of the endpoint.

        Raises:
            RuntimeError: If the episode fails.
        """
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
        # The PYTHONPATH of the run is for its own Python interpreter.
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
                end.set_exception(RuntimeError(f"the verifiers process exited with code {code}"))

    def _tell(self, content: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(content).encode() + b"\n")


run = VerifiersProcess().run


def environment(taskset: str) -> Any:
    """Return the environment of a taskset, which runs on this machine.

    It uses the harness of the taskset; a taskset without a harness gets a loop that only calls the
    taskset's tools.
    """
    import verifiers.v1 as vf

    # The default for a taskset without a harness is "bash", which would run commands of the policy
    # on this machine.
    own = vf.default_harness_id(taskset)
    # Further options of the agent, such as "max_turns", can be added here.
    agent = {"harness": {"id": "null" if own == "bash" else own}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))


async def episode(env: Any, asked: dict[str, Any]) -> None:
    """Run the episode of a request and post its reward.

    Args:
        env: Environment of verifiers.
        asked: Request with `number`, `task`, `base_url` and `api_key`.

    Raises:
        RuntimeError: If the episode failed.
    """
    import verifiers.v1 as vf

    task_type = type(env.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(asked["task"]), env.taskset.config.task)
    # verifiers reads API keys only from environment variables.
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
    """Send the reward of an episode to the run."""
    headers = {"Authorization": f"Bearer {asked['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{asked['base_url']}/reward", json.dumps({"reward": reward}).encode(), headers
    )
    urllib.request.urlopen(request, timeout=30).close()


async def serve(taskset: str) -> None:
    """Run the episodes that are requested on standard input, until it is closed."""
    env, running = environment(taskset), dict[int, asyncio.Task[None]]()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of an environment must not mix with the answers

    async def answered(asked: dict[str, Any]) -> None:
        problem = None
        try:
            await episode(env, asked)
        except Exception as error:  # an environment can raise any exception
            problem = f"{type(error).__name__}: {error}"[:MOST_TOLD]
        finally:
            running.pop(asked["number"], None)
        print(json.dumps({"number": asked["number"], "problem": problem}), file=answers, flush=True)

    lines = asyncio.StreamReader(limit=MOST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    # Do not use `env.serving()`: each episode has its own endpoint address, and `serving` keeps a
    # client for every address until it exits. This way each rollout has its own server between
    # harness and endpoint, and closes it.
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
    """Run the command `serve` or `tasks` with the Python interpreter of verifiers."""
    what, taskset = sys.argv[1:]
    if what == "serve":
        asyncio.run(serve(taskset))
        return
    for task in environment(taskset).taskset:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        print(json.dumps({"prompt": task.data.prompt_text, "verifiers": data}))


if __name__ == "__main__":
    main()
