"""Implementation of `aligner serve-model`: an OpenAI-compatible endpoint of a stored model."""

import asyncio
import itertools
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from aligner.agents.generate import load, require_generating
from aligner.agents.message_matching import template_messages
from aligner.agents.openai_protocol import Answer, DrawnToken, ModelChatBody, Refused, parsed
from aligner.agents.openai_server import OpenAIServer, models_response
from aligner.data.chat_turns import ChatTurns
from aligner.data.export import Source
from aligner.data.tokenizer import Tokenizer
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import RequestKey, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.schema import EngineConfig

# maximum number of tokens of an answer if its request sets no limit
_MOST_TOKENS = 512
# characters per token of context that a request body may have
_CHARACTERS_A_TOKEN = 16


@dataclass(frozen=True, eq=False)
class _FirstToken:
    """A request for one token with its most probable alternatives."""

    body: ModelChatBody
    read: Tensor
    """int64 [T]: the tokens of the rendered messages."""
    answer: "Future[Answer]" = field(default_factory=Future)
    """The answer, which the thread of the engine sets."""


class ModelEndpoint(OpenAIServer):
    """Endpoint that serves `/v1/chat/completions` and `/v1/models`.

    Requests with the same sampling parameters share the engine's batches. The model's chat template
    renders the messages; a model without one reads their texts, separated by blank lines.

    The HTTP server runs in a thread of its own; the caller runs the engine with `work`.
    """

    def __init__(self, source: Source, settings: EngineConfig, host: str, port: int) -> None:
        """Load the model into an engine; `start` starts the HTTP server.

        Args:
            source: The stored model.
            settings: The section `engine` of the configuration.
            host: Address of this machine.
            port: TCP port; 0 selects a free one.

        Raises:
            ConfigError: The model generates no text or has no tokenizer.
        """
        shape = require_generating(source)
        self._tokenizer = Tokenizer(source.companions)
        self._positions = shape.max_positions
        self._name = source.directory.name
        self._stops = shape.eos_token_ids
        self._chat: ChatTurns | None = None
        self.notice: str | None = None
        """Message for the user if the model has no chat template."""
        try:
            self._chat = ChatTurns(self._tokenizer, None)
        except ConfigError as error:
            self.notice = (
                f"{error}; prompts consist of the messages' texts, separated by blank lines"
            )
        self._engine = EmbeddedEngine(
            shape, settings, 0, seed=1, device="cuda" if torch.cuda.is_available() else "cpu"
        )
        load(self._engine, source)
        self._first_tokens = queue.SimpleQueue[_FirstToken]()
        self._ids = itertools.count()
        super().__init__(host, port, _CHARACTERS_A_TOKEN * self._positions, "--host")

    def routes(self) -> list[Route]:
        """See `OpenAIServer.routes`."""
        return [
            Route("/v1/chat/completions", self._completed, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]

    def work(self) -> None:
        """Run the engine's steps until the process is interrupted."""
        while True:
            self._engine.wake_up.wait()
            self._engine.wake_up.clear()
            while self._engine.has_work:
                self._step()
            # only the thread of the engine may run the model
            while not self._first_tokens.empty():
                self._answer_first_token(self._first_tokens.get())

    def _step(self) -> None:
        """Run one engine step; if it fails, its error fails all requests in flight."""
        try:
            self._engine.step()
        except AlignerError as error:
            self._engine.fail_all(error)

    async def _models(self, request: Request) -> JSONResponse:
        """List the model."""
        return models_response(self._name)

    async def _completed(self, request: Request) -> Response:
        """Answer a request for a chat completion."""
        body = parsed(ModelChatBody, await self.read(request))
        read = self._read(body)
        room = self._positions - len(read)
        if room < 1:
            limit = self._positions - 1
            raise Refused(
                400,
                f"messages: the prompt has {len(read)} tokens; must have at most {limit} to leave"
                " room for a response",
                "context_length_exceeded",
            )
        limit = min(body.limit or _MOST_TOKENS, room)
        return await self.answer(request, body, self._answers(body, read, limit))

    async def _answers(self, body: ModelChatBody, read: Tensor, most: int) -> list[Answer]:
        """Return `body.n` answers to the tokens `read`, int64 [T]."""
        tasks = [
            asyncio.create_task(
                self._first_token_answer(body, read)
                if body.top_logprobs
                else self._whole_answer(body, read, most)
            )
            for _ in range(body.n)
        ]
        try:
            return await asyncio.gather(*tasks)
        except AlignerError as error:
            raise Refused(500, str(error)) from error
        finally:
            for task in tasks:  # after a failure, the other answers are not needed
                task.cancel()

    async def _whole_answer(self, body: ModelChatBody, read: Tensor, most: int) -> Answer:
        """Generate an answer of at most `most` tokens to the tokens `read`, int64 [T]."""
        sampling = SamplingOptions(
            most,
            # greedy decoding reports log-probs at temperature 1
            temperature=body.temperature or 1.0,
            top_p=body.top_p,
            greedy=body.temperature == 0,
            stop_token_ids=self._stops,
        )
        key = RequestKey(next(self._ids), 0, len(read))
        completion = await self._engine.generate(read, sampling, key=key)
        pairs = zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)
        return self._answer(read, [self._token(*pair) for pair in pairs], completion.tokens)

    async def _first_token_answer(self, body: ModelChatBody, read: Tensor) -> Answer:
        """Return an answer of one token with alternatives; the engine's thread computes it."""
        first_token = _FirstToken(body, read)
        self._first_tokens.put(first_token)
        self._engine.wake_up.set()
        return await asyncio.wrap_future(first_token.answer)

    def _read(self, body: ModelChatBody) -> Tensor:
        """Return the input tokens of a request, int64 [T]. Raises Refused if they are invalid."""
        messages = template_messages(body.messages)
        try:
            if self._chat is not None:
                return self._chat.begin(messages, None, body.chat_template_kwargs).tokens
            return self._tokenizer.encode(
                "\n\n".join(message["content"] for message in messages), add_bos=True
            )
        except AlignerError as error:
            raise Refused(400, str(error)) from error

    def _answer_first_token(self, ask: "_FirstToken") -> None:
        """Compute one token and its most probable alternatives, and set the answer."""
        if not ask.answer.set_running_or_notify_cancel():
            return
        body = ask.body
        try:
            (logits,) = self._engine.next_logits([ask.read])
        except AlignerError as error:
            ask.answer.set_exception(error)
            return

        logprobs = (logits / (body.temperature or 1.0)).log_softmax(-1)
        best_logprobs, tokens = logprobs.topk(min(body.top_logprobs or 0, len(logprobs)))
        token = tokens[:1] if body.temperature == 0 else logprobs.exp().multinomial(1)
        likeliest = tuple(map(self._token, tokens.tolist(), best_logprobs.tolist()))
        sampled_token = self._token(int(token), float(logprobs[token]))
        answer_token = DrawnToken(sampled_token.text, sampled_token.logprob, likeliest)
        ask.answer.set_result(self._answer(ask.read, [answer_token], token))

    def _token(self, token: int, logprob: float) -> DrawnToken:
        """Return a token id as a token of an answer."""
        return DrawnToken(self._tokenizer.decode_token(token), logprob)

    def _answer(self, read: Tensor, tokens: Sequence[DrawnToken], generated: Tensor) -> Answer:
        """Return the answer that consists of the generated tokens, int64 [R]."""
        has_ended = bool(self._tokenizer.is_eos(generated[-1:]))
        text = self._tokenizer.decode_after(
            read, generated[:-1] if has_ended else generated, skip_special_tokens=False
        )
        return Answer(text, "stop" if has_ended else "length", len(read), tuple(tokens))
