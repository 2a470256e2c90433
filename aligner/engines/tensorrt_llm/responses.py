"""Responses drawn from TensorRT-LLM's client: token by token, so that they can be interrupted and go on later."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aligner.engines.engine_protocol import PartialResponse, SamplingOptions
from aligner.errors import AlignerError


@dataclass(eq=False)
class Response(PartialResponse):
    """A response so far, and what draws it."""

    output: Any = None
    """TensorRT-LLM's, while it draws tokens."""
    cancelled: bool = False


class Responder:
    """Draws responses; lives on the event loop, where all of its coroutines run."""

    def __init__(self, llm: Any, sampling_params: Callable[..., Any], seed: int, timeout_s: float) -> None:
        """`llm` and `sampling_params`: TensorRT-LLM's AsyncLLM and SamplingParams; the next token may take `timeout_s`."""
        self._llm, self._sampling_params, self._seed, self._timeout_s = llm, sampling_params, seed, timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._drawing: set[Response] = set()
        self._admits = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._version = -1
        self._chunks = 0

    async def admit(self, version: int) -> None:
        """Requests go to the engine from now on; `version` stamps the tokens that they draw."""
        self._version = version
        self._admits.set()

    async def hold(self, *, interrupts: bool) -> None:
        """Return when the engine is idle, and stays so until `admit`.

        Responses under way are finished first, or interrupted: they keep their tokens, and go on from them later.
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
            raise AlignerError(f"TensorRT-LLM did not cancel {count} response(s) within {self._timeout_s:g} s") from error

    async def start(self, responses: Sequence[Response], options: SamplingOptions) -> list[asyncio.Task[None]]:
        """One task for each response, done when it is complete."""
        tasks = [asyncio.create_task(self._complete(response, options)) for response in responses]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return tasks

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

    async def wait(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Return when one of them is done, or when none can be before the next `admit`."""
        while self._admits.is_set() and not any(task.done() for task in tasks):
            await self._progress(tasks, asyncio.FIRST_COMPLETED)

    async def _progress(self, tasks: Collection[asyncio.Task[None]], until: str) -> None:
        """Wait for tasks, `timeout_s` at most. Raises AlignerError when by then no response has gained a token."""
        before = self._chunks
        done, _ = await asyncio.wait(tasks, timeout=self._timeout_s, return_when=until)
        if not done and before == self._chunks and self._admits.is_set():
            raise AlignerError(
                f"TensorRT-LLM gave none of {len(tasks)} responses a token within {self._timeout_s:g} s"
                " (engine.tensorrt_llm.timeout_s)"
            )

    async def _complete(self, response: Response, options: SamplingOptions) -> None:
        while response.finish_reason is None and not response.cancelled:
            await self._admits.wait()
            try:
                await self._draw(response, options)
            except Exception as error:
                request = response.request
                raise AlignerError(f"prompt {request.prompt.id}, sample {request.sample_index}: {error}") from error

    async def _draw(self, response: Response, options: SamplingOptions) -> None:
        """One request to the engine: to the response's end, to its least length, or until it is interrupted."""
        short_by = max(0, options.min_new_tokens - len(response.tokens))
        prompt = response.request.prompt
        output = self._llm.generate_async(
            inputs=[*prompt.tokens.tolist(), *response.tokens],
            sampling_params=self._sampling_params(**self._sampling(response, options, short_by)),
            streaming=True,
        )
        response.output = output
        self._drawing.add(response)
        self._idle.clear()
        try:
            async for _ in output:
                self._chunks += 1
        finally:
            response.output = None
            self._drawing.discard(response)
            if not self._drawing:
                self._idle.set()
        tokens, logprobs = _drawn(output.outputs[0], interrupted=response.cancelled or not self._admits.is_set())
        response.tokens += tokens
        response.logprobs += logprobs
        response.versions += [self._version] * len(tokens)
        if tokens and not short_by and tokens[-1] in options.stop_token_ids:
            response.finish_reason = "stop"
        elif len(response.tokens) >= response.turn_limit:
            response.finish_reason = "length"

    def _sampling(self, response: Response, options: SamplingOptions, short_by: int) -> dict[str, Any]:
        """Keywords of SamplingParams for what is left of a response.

        Stop tokens are stop words, not the end id: these are part of the output. The least length of TensorRT-LLM's own
        holds for the end id alone, so until then stop tokens are bad words, in a request of its own.
        """
        stops = list(options.stop_token_ids)
        return {
            "max_tokens": short_by or response.turn_limit - len(response.tokens),
            "temperature": options.temperature,
            "top_k": 1 if options.greedy else options.top_k,
            "top_p": None if options.greedy else options.top_p,
            "seed": None if options.greedy else _seed(self._seed, response),
            "logprobs": 1,
            "end_id": -1,
            "detokenize": False,
            "include_stop_str_in_output": True,
            **({"bad_token_ids": stops} if short_by else {"stop_token_ids": stops} if stops else {}),
        }


def _seed(seed: int, response: Response) -> int:
    """A request's seed: another one for every sample, and for the rest of an interrupted one."""
    request = response.request
    entropy = [seed, request.prompt.id, request.sample_index, len(response.tokens)]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1


def _drawn(completion: Any, interrupted: bool) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a finished or interrupted output.

    Of an interrupted one, a last token may have come without its log-prob: it is left out, and drawn anew.
    Raises AlignerError for an output that ended otherwise, or that lacks log-probs.
    """
    reason, tokens, entries = completion.finish_reason, list(completion.token_ids), list(completion.logprobs or ())
    if reason == "cancelled" and interrupted:
        count = min(len(tokens), len(entries))
        tokens, entries = tokens[:count], entries[:count]
    elif reason not in ("stop", "length"):
        raise AlignerError(f"TensorRT-LLM ended a response with finish_reason={reason!r}; stop or length was expected")
    if len(tokens) != len(entries):
        raise AlignerError(f"TensorRT-LLM returned {len(tokens)} tokens with {len(entries)} log-probs")
    return tokens, [_logprob(entry, token) for token, entry in zip(tokens, entries, strict=True)]


def _logprob(entry: Any, token: int) -> float:
    """A token's log-prob: releases give a number, or the most probable tokens and the drawn one by id."""
    if not isinstance(entry, dict):
        return float(entry)
    if token not in entry:
        raise AlignerError(f"TensorRT-LLM returned log-probs of tokens {sorted(entry)}, but drew {token}")
    return float(entry[token].logprob)
