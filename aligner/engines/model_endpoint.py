"""A stored model behind an endpoint of OpenAI's API: what `aligner serve-model` does."""

import asyncio
import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from aligner.data.chat_turns import ChatTurns
from aligner.data.export import Source
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.generate import load, require_generating
from aligner.environments.message_matching import template_messages
from aligner.environments.openai_protocol import Answer, DrawnToken, ModelChatBody, Refused, parsed
from aligner.environments.openai_server import OpenAIServer, models_response
from aligner.errors import AlignerError, ConfigError
from aligner.schema import EngineConfig

_MOST_TOKENS = 512
"""Of an answer, where its request says nothing."""
_CHARACTERS_A_TOKEN = 16
"""Of a request's body, at most."""


@dataclass(frozen=True, eq=False)
class _Ask:
    """An answer that is wanted."""

    body: ModelChatBody
    read: Tensor
    """int64 [T]: all that the model is to answer."""
    most: int
    """Tokens of the answer."""
    given: "asyncio.Future[Answer]"

    @property
    def way(self) -> tuple[float, float, bool]:
        """How it is drawn; those that are drawn alike are drawn together."""
        return self.body.temperature, self.body.top_p, bool(self.body.top_logprobs)


class ModelEndpoint(OpenAIServer):
    """Serves `/v1/chat/completions` and `/v1/models`, one batch of answers after another.

    A batch is all that waits when the one before is done, and is drawn alike. Messages are worded
    by the model's chat template; a model without one reads their texts, a blank line between them.
    """

    def __init__(self, source: Source, settings: EngineConfig, host: str, port: int) -> None:
        """Reads the weights. Raises ConfigError for a model that generates no text or has no
        tokenizer."""
        shape = require_generating(source)
        self._tokenizer, self._positions = Tokenizer(source.companions), shape.max_positions
        self._name, self._stops = source.directory.name, shape.eos_token_ids
        self._chat: ChatTurns | None = None
        self.notice: str | None = None
        """What a person should know."""
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
        self._waiting = queue.SimpleQueue[_Ask]()
        self._ids = itertools.count()
        super().__init__(host, port, _CHARACTERS_A_TOKEN * self._positions, "--host")

    def routes(self) -> list[Route]:
        """As `OpenAIServer`."""
        return [
            Route("/v1/chat/completions", self._completed, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]

    def work(self) -> None:
        """Answer what waits, until interrupted."""
        while True:
            asks = [self._waiting.get()]
            while not self._waiting.empty():
                asks.append(self._waiting.get())
            for way in dict.fromkeys(ask.way for ask in asks):
                self._draw([ask for ask in asks if ask.way == way and not ask.given.done()])

    async def _models(self, request: Request) -> JSONResponse:
        return models_response(self._name)

    async def _completed(self, request: Request) -> Response:
        body = parsed(ModelChatBody, await self.read(request))
        read = self._read(body)
        room = self._positions - len(read)
        if room < 1:
            most = self._positions - 1
            raise Refused(
                400,
                f"messages: the prompt has {len(read)} tokens; must have at most {most} to leave"
                " room for a response",
                "context_length_exceeded",
            )
        loop = asyncio.get_running_loop()
        most = min(body.limit or _MOST_TOKENS, room)
        asks = [_Ask(body, read, most, loop.create_future()) for _ in range(body.n)]
        for ask in asks:
            self._waiting.put(ask)
        return await self.answer(request, body, _all_given(asks))

    def _read(self, body: ModelChatBody) -> Tensor:
        """What the model is to answer, int64 [T]. Raises Refused."""
        messages = template_messages(body.messages)
        try:
            if self._chat is not None:
                return self._chat.begin(messages, None, body.chat_template_kwargs).tokens
            return self._tokenizer.encode(
                "\n\n".join(message["content"] for message in messages), begins=True
            )
        except AlignerError as error:
            raise Refused(400, str(error)) from error

    def _draw(self, asks: Sequence[_Ask]) -> None:
        """Draw the answers to some, all alike."""
        try:
            if asks and asks[0].body.top_logprobs:
                self._draw_first(asks)
            elif asks:
                self._draw_whole(asks)
        except AlignerError as error:
            refused = Refused(500, str(error))
            for ask in asks:
                self.call(_unless_done(ask.given, ask.given.set_exception), refused)

    def _draw_whole(self, asks: Sequence[_Ask]) -> None:
        body, most = asks[0].body, max(ask.most for ask in asks)
        # The engine's zero is the limit, and log-probs have none there: they are those at 1.
        options = SamplingOptions(
            most,
            temperature=body.temperature or 1.0,
            top_p=body.top_p,
            greedy=body.temperature == 0,
            stop_token_ids=self._stops,
        )
        requests = [
            GenerationRequest(Prompt(next(self._ids), "", ask.read), 0, ask.most) for ask in asks
        ]
        generation = SingleResponses(self._engine).start(requests, options)
        try:
            while not generation.done:
                for place, sample in generation.step():
                    drawn = list(
                        zip(sample.response.tolist(), sample.engine_logprobs.tolist(), strict=True)
                    )
                    self._give(asks[place], [self._token(*each) for each in drawn], sample.response)
        finally:
            generation.cancel()

    def _draw_first(self, asks: Sequence[_Ask]) -> None:
        """Answers of one token, with what else that could be."""
        logits = self._engine.next_logits([ask.read for ask in asks])
        logprobs = (logits / (asks[0].body.temperature or 1.0)).log_softmax(-1)
        for ask, each in zip(asks, logprobs, strict=True):
            best, tokens = each.topk(min(ask.body.top_logprobs or 0, len(each)))
            token = tokens[:1] if ask.body.temperature == 0 else each.exp().multinomial(1)
            likeliest = tuple(map(self._token, tokens.tolist(), best.tolist()))
            shown = self._token(int(token), float(each[token]))
            self._give(ask, [DrawnToken(shown.text, shown.logprob, likeliest)], token)

    def _token(self, token: int, logprob: float) -> DrawnToken:
        return DrawnToken(self._tokenizer.piece(token), logprob)

    def _give(self, ask: _Ask, tokens: Sequence[DrawnToken], drawn: Tensor) -> None:
        """Answer with these tokens, int64 [R]."""
        ended = bool(self._tokenizer.ends(drawn[-1:]))
        text = self._tokenizer.decode_after(
            ask.read, drawn[:-1] if ended else drawn, skip_special_tokens=False
        )
        answer = Answer(text, "stop" if ended else "length", len(ask.read), tuple(tokens))
        self.call(_unless_done(ask.given, ask.given.set_result), answer)


async def _all_given(asks: Sequence[_Ask]) -> list[Answer]:
    """All answers; where this is cancelled, or one fails, nobody wants the others."""
    try:
        return [await ask.given for ask in asks]
    finally:
        for ask in asks:
            ask.given.cancel()


def _unless_done(
    future: "asyncio.Future[Answer]", then: Callable[..., None]
) -> Callable[..., None]:
    def give(value: object) -> None:
        if not future.done():  # its client has gone
            then(value)

    return give
