"""Requests of an agent that are not trained on (header `X-Aligner-Train: false`).

The current policy answers them, for example as a user simulator or as a judge. They are no turns of
the episode: nothing is recorded, and no later request continues their tokens.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torch import Tensor

from aligner.agents.answers import (
    AnswerBuilder,
    begin_conversation,
    build_length_error,
    check_prompt_tokens,
    find_prompt_problem,
    prepare,
    with_call_id_key,
)
from aligner.agents.protocols.requests import (
    Answer,
    ChatRequest,
    ModelRequest,
    RequestError,
    TextRequest,
    build_refusal,
)
from aligner.agents.request_sampling import check_sampling
from aligner.agents.response_grammars import build_request_grammar
from aligner.agents.session_context import SessionContext
from aligner.data.chat_turns import Conversation
from aligner.data.types import Completion
from aligner.errors import AlignerError

GenerateUntrained = Callable[
    [ModelRequest, Tensor, int, str | None, int], Coroutine[Any, Any, Completion]
]
"""Function that generates an answer with the sampling parameters of its request. Its arguments are
the request, its input tokens, int64 [T], the maximum number of generated tokens, the grammar, and
the number that selects the random stream (`RequestKey.repeats`)."""

# Random streams of untrained requests. They differ from those of turns with the same input, whose
# numbers count the repetitions. A request with a seed has a stream of its own for each answer.
_FIRST_STREAM = 1 << 32
_FIRST_SEEDED_STREAM = 1 << 33
_SEED_COUNT = 1 << 31
_MAX_ANSWERS_PER_SEED = 1 << 8


class UntrainedRequests:
    """The untrained requests of one attempt of an agent.

    An answer depends only on the weights, the episode, the request, and the number of earlier
    requests with the same input tokens.
    """

    def __init__(
        self, context: SessionContext, answer_builder: AnswerBuilder, generate: GenerateUntrained
    ) -> None:
        self._context = context
        self._answer_builder = answer_builder
        self._generate = generate
        self._streams_in_use = defaultdict[bytes, set[int]](set)
        """Streams of earlier requests, by the bytes of their input tokens."""
        self._streams_of_request: dict[str, tuple[bytes, Sequence[int]]] = {}
        """Input tokens and streams of each answered request, by its id."""
        self._tasks = set[asyncio.Task[Completion]]()
        self.answers_requested = 0
        """Number of answers that were requested so far."""

    def cancel(self) -> None:
        """Cancel the completions in flight."""
        # a copy, because finished tasks remove themselves from the set
        for task in [*self._tasks]:
            task.cancel()

    def mark_unreceived(self, request: ModelRequest) -> None:
        """Note that the client has not received the answers to a request: a repetition of the
        request gets the same answers."""
        if request.id in self._streams_of_request:
            input_bytes, streams = self._streams_of_request.pop(request.id)
            self._streams_in_use[input_bytes].difference_update(streams)

    async def answer(self, request: ModelRequest) -> list[Answer] | None:
        """Return `request.n` answers; None if the attempt ended before.

        If this coroutine is cancelled, because the client has disconnected, a repetition of the
        request gets the same answers.

        Raises:
            RequestError: The request is invalid or not supported.
        """
        self.answers_requested += request.n
        context = self._context
        _check_supported(request)
        check_sampling(request, context.tokenizer.vocab_size)
        try:
            conversation, input_tokens, grammar = await prepare(
                request, lambda: self._prepare(request)
            )
        except AlignerError as error:
            raise build_refusal(error) from error
        available_tokens = context.max_sequence_length - len(input_tokens)
        if available_tokens < 1:
            raise build_length_error(request, len(input_tokens), context.max_sequence_length)
        max_tokens = min(request.max_tokens or context.settings.max_turn_tokens, available_tokens)

        streams = self._select_streams(request, input_tokens)
        self._streams_of_request[request.id] = (input_tokens.numpy().tobytes(), streams)
        tasks = [
            asyncio.create_task(self._generate(request, input_tokens, max_tokens, grammar, stream))
            for stream in streams
        ]
        self._tasks.update(tasks)
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            self.mark_unreceived(request)
            raise
        finally:
            self._tasks.difference_update(tasks)
        if any(task.cancelled() for task in tasks):
            return None
        return [
            self._build_answer(request, conversation, input_tokens, task.result(), stream)
            for task, stream in zip(tasks, streams, strict=True)
        ]

    def _prepare(self, request: ModelRequest) -> tuple[Conversation | None, Tensor, str | None]:
        """Return the chat of a request, None for a text completion, its input tokens, int64 [T],
        and the grammar of its answers."""
        context = self._context
        if isinstance(request, ChatRequest):
            conversation = begin_conversation(request, context.get_chat())
            grammar = build_request_grammar(
                request, conversation.text, context.tokenizer, context.get_chat
            )
            return conversation, conversation.tokens, grammar
        assert isinstance(request, TextRequest)
        if not isinstance(request.prompt, str):
            tokens = check_prompt_tokens(request.prompt, context.tokenizer.vocab_size)
            return None, tokens, None
        if not request.prompt:
            raise RequestError(400, "prompt: must not be empty", param="prompt")
        return None, context.tokenizer.encode(request.prompt, add_bos=True), None

    def _select_streams(self, request: ModelRequest, input_tokens: Tensor) -> Sequence[int]:
        """Return the numbers of the random streams of a request's answers."""
        seed = request.sampling.seed
        if seed is not None:
            first = _FIRST_SEEDED_STREAM + seed % _SEED_COUNT * _MAX_ANSWERS_PER_SEED
            return range(first, first + request.n)
        in_use = self._streams_in_use[input_tokens.numpy().tobytes()]
        unused = (stream for stream in itertools.count(_FIRST_STREAM) if stream not in in_use)
        streams = [*itertools.islice(unused, request.n)]
        in_use.update(streams)
        return streams

    def _build_answer(
        self,
        request: ModelRequest,
        conversation: Conversation | None,
        input_tokens: Tensor,
        completion: Completion,
        stream: int,
    ) -> Answer:
        """Return a completion as an answer for the agent."""
        if conversation is not None:
            conversation = with_call_id_key(conversation, input_tokens, completion.tokens, stream)
        return self._answer_builder.build(
            request,
            conversation,
            input_tokens,
            completion.tokens,
            self._answer_builder.build_tokens(completion.tokens, completion.logprobs),
            is_truncated=completion.finish_reason == "length",
        )


def _check_supported(request: ModelRequest) -> None:
    """Raise RequestError if a request needs the log-probs of tokens that are not generated, or has
    several prompts."""
    if (problem := find_prompt_problem(request)) is not None:
        raise RequestError(
            400, f"{problem}; aligner serve-model supports other values", "unsupported"
        )
