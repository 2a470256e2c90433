"""Implementation of `aligner serve-model`: an OpenAI-compatible endpoint of a stored model."""

import asyncio
import itertools
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from aligner.agents.generate import build_source_tokenizer, load_weights, read_generating_shape
from aligner.agents.message_matching import to_template_messages
from aligner.agents.openai_protocol import (
    Answer,
    AnswerToken,
    ModelChatBody,
    RequestError,
    parse_body,
)
from aligner.agents.openai_server import OpenAIServer, build_models_response
from aligner.data.chat_turns import ChatTurns
from aligner.data.export import Source
from aligner.data.stop_strings import cut_before_stop
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import RequestKey, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, EngineConfig

# maximum number of tokens of an answer if its request sets no limit
_DEFAULT_MAX_TOKENS = 512
# maximum number of characters of a request body per position of the model
_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, eq=False)
class _FirstTokenRequest:
    """A request for one token with its most probable alternatives."""

    body: ModelChatBody
    input_tokens: Tensor
    """Tokens of the rendered messages, int64 [T]."""
    answer: "Future[Answer]" = field(default_factory=Future)
    """The answer, which the thread of the engine sets."""


class ModelEndpoint(OpenAIServer):
    """Endpoint that serves `/v1/chat/completions` and `/v1/models`.

    Requests with the same sampling parameters share the engine's batches. The model's chat template
    renders the messages; a model without one reads their texts, separated by blank lines.

    The HTTP server runs in a thread of its own; the caller runs the engine with `run_engine`.
    """

    def __init__(
        self,
        source: Source,
        settings: EngineConfig,
        host: str,
        port: int,
        *,
        run: Config | None = None,
    ) -> None:
        """Load the model into an engine; `start` starts the HTTP server.

        Args:
            source: The stored model.
            settings: The section `engine` of the configuration.
            host: Address of this machine.
            port: TCP port; 0 selects a free one.
            run: Configuration of the run that trained the model; its settings of the chat template
                are used. None for another model.

        Raises:
            ConfigError: The model generates no text or has no tokenizer.
        """
        shape = read_generating_shape(source)
        self._tokenizer = build_source_tokenizer(source, run)
        self._max_positions = shape.max_positions
        self._model_name = source.directory.name
        self._stop_token_ids = shape.eos_token_ids
        # None if the model has no chat template; the messages' texts are then joined
        self._chat: ChatTurns | None = None
        self.notice: str | None = None
        """Message for the user if the model has no chat template; otherwise None."""
        try:
            self._chat = ChatTurns(self._tokenizer, None)
        except ConfigError as error:
            self.notice = (
                f"{error}; prompts consist of the messages' texts, separated by blank lines"
            )
        self._engine = EmbeddedEngine(
            shape,
            settings,
            0,
            seed=1,
            device="cuda" if torch.cuda.is_available() else "cpu",
            tokenizer_directory=source.companions,
        )
        load_weights(self._engine, source)
        # the HTTP thread fills this queue, and the thread of `run_engine` empties it
        self._first_token_requests = queue.SimpleQueue[_FirstTokenRequest]()
        self._ids = itertools.count()
        super().__init__(host, port, _CHARACTERS_PER_TOKEN * self._max_positions, "--host")

    def build_routes(self) -> list[Route]:
        """See `OpenAIServer.build_routes`."""
        return [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
        ]

    def run_engine(self) -> None:
        """Run the engine's steps until the process is interrupted."""
        while True:
            self._engine.wake_up.wait()
            # Clear the event before checking for work, so that a request that arrives during the
            # check sets it again.
            self._engine.wake_up.clear()
            while self._engine.has_work:
                self._step()
            # only the thread of the engine may run the model
            while not self._first_token_requests.empty():
                self._answer_first_token(self._first_token_requests.get())

    def _step(self) -> None:
        """Run one engine step; if it fails, its error fails all requests in flight."""
        try:
            self._engine.step()
        except AlignerError as error:
            self._engine.fail_all(error)

    async def _list_models(self, request: Request) -> JSONResponse:
        """List the model."""
        return build_models_response(self._model_name)

    async def _complete(self, request: Request) -> Response:
        """Answer a request for a chat completion."""
        body = parse_body(ModelChatBody, await self.read_body(request))
        input_tokens = self._tokenize(body)
        available_tokens = self._max_positions - len(input_tokens)
        if available_tokens < 1:
            limit = self._max_positions - 1
            raise RequestError(
                400,
                f"messages: the prompt has {len(input_tokens)} tokens; must have at most {limit} to"
                " leave room for a response",
                "context_length_exceeded",
            )
        max_tokens = min(body.token_limit or _DEFAULT_MAX_TOKENS, available_tokens)
        pending_answers = self._generate_answers(body, input_tokens, max_tokens)
        return await self.respond(request, body, pending_answers)

    async def _generate_answers(
        self, body: ModelChatBody, input_tokens: Tensor, max_tokens: int
    ) -> list[Answer]:
        """Return `body.n` answers to the input tokens, int64 [T]."""
        tasks = [
            asyncio.create_task(
                self._request_first_token(body, input_tokens)
                if body.top_logprobs
                else self._generate_answer(body, input_tokens, max_tokens)
            )
            for _ in range(body.n)
        ]
        try:
            return await asyncio.gather(*tasks)
        except AlignerError as error:
            raise RequestError(500, str(error)) from error
        finally:
            # if one answer fails, cancel the tasks of the other answers
            for task in tasks:
                task.cancel()

    async def _generate_answer(
        self, body: ModelChatBody, input_tokens: Tensor, max_tokens: int
    ) -> Answer:
        """Generate an answer of at most `max_tokens` tokens to the input tokens, int64 [T]."""
        sampling = SamplingOptions(
            max_tokens,
            # greedy decoding reports log-probs at temperature 1
            temperature=body.temperature or 1.0,
            top_p=body.top_p,
            greedy=body.temperature == 0,
            stop_token_ids=self._stop_token_ids,
            stop=body.stop_strings,
        )
        key = RequestKey(next(self._ids), 0, len(input_tokens))
        completion = await self._engine.generate(input_tokens, sampling, key=key)
        answer_tokens = [
            self._build_answer_token(token, logprob)
            for token, logprob in zip(
                completion.tokens.tolist(), completion.logprobs.tolist(), strict=True
            )
        ]
        answer = self._build_answer(input_tokens, answer_tokens, completion.tokens)
        return replace(
            answer,
            text=cut_before_stop(answer.text, body.stop_strings),
            finish_reason="length" if completion.finish_reason == "length" else "stop",
        )

    async def _request_first_token(self, body: ModelChatBody, input_tokens: Tensor) -> Answer:
        """Return an answer of one token with alternatives; the engine's thread computes it."""
        first_token_request = _FirstTokenRequest(body, input_tokens)
        self._first_token_requests.put(first_token_request)
        self._engine.wake_up.set()
        return await asyncio.wrap_future(first_token_request.answer)

    def _tokenize(self, body: ModelChatBody) -> Tensor:
        """Return the input tokens of a request, int64 [T].

        Raises RequestError if the request is invalid.
        """
        messages = to_template_messages(body.messages)
        try:
            if self._chat is not None:
                return self._chat.begin(messages, None, body.chat_template_kwargs).tokens
            return self._tokenizer.encode(
                "\n\n".join(message["content"] for message in messages), add_bos=True
            )
        except AlignerError as error:
            raise RequestError(400, str(error)) from error

    def _answer_first_token(self, request: _FirstTokenRequest) -> None:
        """Compute one token and its most probable alternatives, and set the answer."""
        # the client may have disconnected while the request was in the queue
        if not request.answer.set_running_or_notify_cancel():
            return
        body = request.body
        try:
            (logits,) = self._engine.next_logits([request.input_tokens])
        except AlignerError as error:
            request.answer.set_exception(error)
            return

        logprobs = (logits / (body.temperature or 1.0)).log_softmax(-1)
        top_values, top_tokens = logprobs.topk(min(body.top_logprobs or 0, len(logprobs)))
        # temperature 0 is greedy decoding
        token = top_tokens[:1] if body.temperature == 0 else logprobs.exp().multinomial(1)
        top_logprobs = tuple(
            map(self._build_answer_token, top_tokens.tolist(), top_values.tolist())
        )
        sampled_token = self._build_answer_token(int(token), float(logprobs[token]))
        answer_token = AnswerToken(sampled_token.text, sampled_token.logprob, top_logprobs)
        request.answer.set_result(self._build_answer(request.input_tokens, [answer_token], token))

    def _build_answer_token(self, token: int, logprob: float) -> AnswerToken:
        """Return a token id as a token of an answer."""
        return AnswerToken(self._tokenizer.decode_token(token), logprob)

    def _build_answer(
        self, input_tokens: Tensor, tokens: Sequence[AnswerToken], generated_tokens: Tensor
    ) -> Answer:
        """Return the answer that consists of the generated tokens, int64 [R]."""
        has_ended = bool(self._tokenizer.is_eos(generated_tokens[-1:]))
        text = self._tokenizer.decode_after(
            input_tokens,
            generated_tokens[:-1] if has_ended else generated_tokens,
            skip_special_tokens=False,
        )
        return Answer(text, "stop" if has_ended else "length", len(input_tokens), tuple(tokens))
