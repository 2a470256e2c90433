"""A server of agent sessions in a process of its own, for tests with thousands of connections.

Usage: `python -m tests.agents.crowded_server MODEL SESSIONS REQUESTS`. The process prints the URLs
and keys of its sessions as JSON, answers no request before `REQUESTS` of them are in flight, and
prints figures about itself after the end of its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
from torch import Tensor

from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion
from tests.agents.answering_sessions import Answering, serving


class Gathering(Answering):
    """Answers no request before a number of requests are in flight."""

    def __init__(self, tokenizer: Tokenizer, requests: int) -> None:
        super().__init__(tokenizer)
        self._requests = requests
        self._has_all = asyncio.Event()
        self.full_mib = 0.0
        """Memory of the process while all requests are in flight."""

    async def generate(
        self,
        input_tokens: Tensor,
        max_tokens: int,
        stop: tuple[str, ...],
        grammar: str | None,
        repeats: int,
    ) -> Completion:
        if self.completions + 1 == self._requests:
            self.full_mib = read_memory_mib()
            self._has_all.set()
        completion = await super().generate(input_tokens, max_tokens, stop, grammar, repeats)
        await self._has_all.wait()
        return completion


def read_memory_mib() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


def main() -> None:
    model, sessions, requests = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    answering = Gathering(Tokenizer(model), requests)
    with serving(model, answering, sessions, max_turns=requests) as (server, opened):
        start_mib = read_memory_mib()
        addresses = [[server.get_session_url(each), str(each.agent_key)] for each in opened]
        print(json.dumps(addresses), flush=True)
        sys.stdin.read()
        figures = {
            "turns": sum(len(session.turns) for session in opened),
            "start_mib": round(start_mib),
            "full_mib": round(answering.full_mib),
            "end_mib": round(read_memory_mib()),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
