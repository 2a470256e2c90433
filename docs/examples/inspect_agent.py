"""Train a policy on a task of `inspect-ai` 0.3, in a separate virtual environment.

Run this file with the Python of that virtual environment to write a task's samples as prompts:

    inspect_agent.py tasks inspect_products:products > tasks.jsonl

Without arguments, this file is the agent (`environment.agent_command`): it evaluates one sample of
the task with its solver and scorer, and reports the score as the reward.
"""

import importlib
import json
import os
import sys
import tempfile
import urllib.request
from typing import Any

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float


def load_task(name: str) -> Task:
    """Return the task of a function `module:function`."""
    module, _, function = name.partition(":")
    task: Task = getattr(importlib.import_module(module), function)()
    return task


def write_tasks(name: str) -> None:
    """Print one record per sample of a task."""
    for sample in load_task(name).dataset:
        question = sample.input if isinstance(sample.input, str) else sample.input[-1].text
        print(json.dumps({"prompt": question, "inspect": {"task": name, "sample": sample.id}}))


def run(record: dict[str, Any], base_url: str, api_key: str) -> None:
    """Evaluate the sample of a record with the policy, and report its score."""
    model = get_model("openai-api/aligner/policy", base_url=base_url, api_key=api_key)
    with tempfile.TemporaryDirectory() as log_directory:
        (log,) = evaluate(
            load_task(record["inspect"]["task"]),
            model=model,
            sample_id=record["inspect"]["sample"],
            log_dir=log_directory,
            display="none",
        )
        if log.status != "success" or not log.samples:
            raise SystemExit(f"inspect: {log.status}: {log.error.message if log.error else ''}")
        # read from the log file, which must still exist
        scores = [*(log.samples[0].scores or {}).values()]
    to_float = value_to_float()
    post_reward(base_url, api_key, sum(to_float(score.value) for score in scores))


def post_reward(base_url: str, api_key: str, reward: float) -> None:
    """Send the reward of the episode to the run."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/reward", json.dumps({"reward": reward}).encode(), headers
    )
    urllib.request.urlopen(request, timeout=30).close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_tasks(sys.argv[2])
    else:
        run(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
