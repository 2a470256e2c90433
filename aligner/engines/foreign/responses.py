"""Responses drawn from another program's engine: in pieces, so that they can be interrupted and go
on later."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from aligner.data.types import Completion, CompletionReason
from aligner.engines.engine_protocol import EngineRequest, SamplingOptions
from aligner.errors import AlignerError, EngineGone


class Output(Protocol):
    """A request to the engine: gives itself, each time that it has more."""

    @property
    def outputs(self) -> Sequence[Any]:
        """One, with `token_ids`, `logprobs` (numbers, or such by token) and `finish_reason`."""

    def abort(self) -> None:
        """Draw no further: it ends as cancelled."""

    def __aiter__(self) -> AsyncIterator["Output"]:
        """Ends when nothing more will come."""


_MOMENT_S = 0.1
"""Between two looks at whether a response is complete, or new weights are there."""


@dataclass(eq=False)
class Response:
    """A request that another program's engine serves, and its tokens so far."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: CompletionReason | None = None
    output: Any = None
    """The engine's output object, while it generates."""
    cancelled: bool = False

    @property
    def limit(self) -> int:
        """Maximum number of tokens."""
        return self.request.sampling.max_new_tokens

    def completion(self) -> Completion:
        """Return the tokens so far."""
        return Completion(
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            weight_versions=torch.tensor(self.versions, dtype=torch.int64),
            finish_reason=self.finish_reason or "interrupted",
        )


Draw = Callable[[list[int], Response, SamplingOptions, int, int], Output]
"""Has the engine go on from these tokens, with the response that they end with, and the seed of
what comes next.

The last number, where it is not 0, is how many tokens are drawn at most, none of which may be a
stop token.
"""


class Responder:
    """Draws responses; lives on the event loop, where all of its coroutines run."""

    def __init__(
        self,
        name: str,
        draw: Draw,
        seed: int,
        timeout_s: float,
        timeout_key: str,
        *,
        has_least: bool,
    ) -> None:
        """The next token of the engine called `name` may take `timeout_s`, which is `timeout_key`.

        `has_least` tells that it keeps the least length of a response itself; else that is drawn by
        a request of its own.
        """
        self._name, self._draw_from, self._seed, self._has_least = name, draw, seed, has_least
        self._timeout_s, self._timeout_key = timeout_s, timeout_key
        self._tasks: set[asyncio.Task[None]] = set()
        self._drawing: set[Response] = set()
        self._admits = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._version = -1
        self._heard = 0.0
        """When a response last began or gained something."""

    async def admit(self, version: int) -> None:
        """Requests go to the engine from now on; `version` stamps the tokens that they draw."""
        self._version = version
        self._admits.set()

    async def hold(self, *, interrupts: bool) -> None:
        """Return when the engine is idle, and stays so until `admit`.

        Responses under way are finished first, or interrupted: they keep their tokens, and go on
        from them later.
        """
        while not interrupts and self._tasks and self._admits.is_set():
            await self._progress(self._tasks, asyncio.ALL_COMPLETED)
        self._admits.clear()
        for response in self._drawing:
            response.output.abort()
        try:
            await asyncio.wait_for(self._idle.wait(), self._timeout_s)
        except asyncio.TimeoutError as error:  # the builtin one only from Python 3.11 on
            count = len(self._drawing)
            raise AlignerError(
                f"{self._name} did not cancel {count} response(s) within {self._timeout_s:g} s"
                f" ({self._timeout_key})"
            ) from error

    async def start(self, responses: Sequence[Response]) -> list[asyncio.Task[None]]:
        """One task for each response, done when it is complete."""
        tasks = [asyncio.create_task(self._complete(response)) for response in responses]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        return tasks

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # has been seen: who no longer waits for a response is not told of it at some later time
            task.exception()

    async def cancel(self, responses: Mapping[asyncio.Task[None], Response]) -> None:
        """Return when the engine draws these no further."""
        for task, response in responses.items():
            response.cancelled = True
            if response.output is None:
                task.cancel()
            else:
                response.output.abort()
        if responses:
            await asyncio.wait(responses)

    async def interrupt(self) -> None:
        """Return when all of them have what was drawn of them; they go on."""
        if self._admits.is_set():
            await self.hold(interrupts=True)
            self._admits.set()

    async def wait(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Return when one of them is done, when none can be before the next `admit`, or after a
        moment."""
        if self._admits.is_set() and not any(task.done() for task in tasks):
            await self._progress(tasks, asyncio.FIRST_COMPLETED)

    async def _progress(self, tasks: Collection[asyncio.Task[None]], until: str) -> None:
        """Wait a moment for tasks. Raises AlignerError when no response has gained a token for
        `timeout_s`."""
        done, _ = await asyncio.wait(
            tasks, timeout=min(_MOMENT_S, self._timeout_s), return_when=until
        )
        if not done and time.monotonic() - self._heard > self._timeout_s and self._admits.is_set():
            raise AlignerError(
                f"{self._name} generated no token for any of {len(tasks)} responses within"
                f" {self._timeout_s:g} s ({self._timeout_key})"
            )

    async def _complete(self, response: Response) -> None:
        while response.finish_reason is None and not response.cancelled:
            await self._admits.wait()
            try:
                await self._draw(response)
            except EngineGone:
                raise
            except Exception as error:
                key = response.request.key
                raise AlignerError(
                    f"prompt {key.prompt_id}, sample {key.sample_index}: {error}"
                ) from error

    async def _draw(self, response: Response) -> None:
        """One request to the engine: to the response's end, to its least length, or until it is
        interrupted."""
        options = response.request.sampling
        short_by = 0 if self._has_least else max(0, options.min_new_tokens - len(response.tokens))
        tokens = [*response.request.tokens.tolist(), *response.tokens]
        output = self._draw_from(tokens, response, options, _seed(self._seed, response), short_by)
        response.output, self._heard = output, time.monotonic()
        self._drawing.add(response)
        self._idle.clear()
        try:
            async for _ in output:
                self._heard = time.monotonic()
        finally:
            response.output = None
            self._drawing.discard(response)
            if not self._drawing:
                self._idle.set()
        tokens, logprobs = self._drawn(
            output.outputs[0], interrupted=response.cancelled or not self._admits.is_set()
        )
        response.tokens += tokens
        response.logprobs += logprobs
        response.versions += [self._version] * len(tokens)
        if tokens and not short_by and tokens[-1] in options.stop_token_ids:
            response.finish_reason = "stop"
        elif len(response.tokens) >= response.limit:
            response.finish_reason = "length"

    def _drawn(self, completion: Any, interrupted: bool) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a finished or interrupted output.

        Of an interrupted one, a last token may have come without its log-prob: it is left out, and
        drawn anew. Raises AlignerError for an output that ended otherwise, or that lacks log-probs.
        """
        reason, tokens, entries = (
            completion.finish_reason,
            list(completion.token_ids),
            list(completion.logprobs or ()),
        )
        if reason == "cancelled" and interrupted:
            count = min(len(tokens), len(entries))
            tokens, entries = tokens[:count], entries[:count]
        elif reason not in ("stop", "length"):
            raise AlignerError(
                f"{self._name} ended a response with finish_reason={reason!r}; expected stop or"
                " length"
            )
        if len(tokens) != len(entries):
            raise AlignerError(
                f"{self._name} returned {len(tokens)} tokens but {len(entries)} log-probs"
            )
        return tokens, [
            self._logprob(entry, token) for token, entry in zip(tokens, entries, strict=True)
        ]

    def _logprob(self, entry: Any, token: int) -> float:
        """A token's log-prob: releases give a number, or the most probable tokens and the drawn one
        by id."""
        if not isinstance(entry, dict):
            return float(entry)
        if token not in entry:
            raise AlignerError(
                f"{self._name} returned log-probs of tokens {sorted(entry)}, but sampled token"
                f" {token}"
            )
        return float(entry[token].logprob)


def _seed(seed: int, response: Response) -> int:
    """A request's seed: another one for every sample, and for the rest of an interrupted one."""
    request = response.request
    key = request.key
    position = len(request.tokens) - key.stream_start + len(response.tokens)
    entropy = [seed, key.prompt_id, key.sample_index, position]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
