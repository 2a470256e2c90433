"""The part of each agent that does not depend on its framework: it reads the task, and reports the
episode's reward."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

BASE_URL = os.environ["OPENAI_BASE_URL"]
API_KEY = os.environ["OPENAI_API_KEY"]

calls: list[list[int]] = []
"""Arguments of the tool calls that were executed."""


def read_task() -> dict[str, Any]:
    """Return the task of the episode."""
    task: dict[str, Any] = json.load(sys.stdin)
    return task


def report(task: dict[str, Any], result: Any) -> None:
    """Write the result and the executed calls to the file `task["log"]`, and post the reward.

    The reward is 1 if the result contains the right product.
    """
    fields = result.model_dump() if hasattr(result, "model_dump") else result
    entry = {"calls": calls, "result": fields, "type": type(result).__name__}
    Path(task["log"]).write_text(json.dumps(entry))
    request = urllib.request.Request(
        f"{BASE_URL}/reward",
        json.dumps({"reward": float("42" in str(fields))}).encode(),
        {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()
