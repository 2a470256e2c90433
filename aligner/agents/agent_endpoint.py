"""OpenAI-compatible endpoint for the agents of a rank.

`AgentSession` contains the turns of one agent episode. It decides which earlier turn a request
continues, so that the policy reads the tokens that it generated, never a second tokenization of
their text. `AgentServer` serves all open sessions over HTTP, each at its own URL and with its own
API key, in a thread of the rank's process.
"""

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from aligner.agents.message_matching import compared, template_messages
from aligner.agents.openai_protocol import (
    MODEL,
    Answer,
    ChatBody,
    CompletionBody,
    DrawnToken,
    Refused,
    RewardBody,
    TextBody,
    parsed,
)
from aligner.agents.openai_server import OpenAIServer, models_response
from aligner.data.chat_turns import ChatTurns, Conversation, NewBranch
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import ToolCall
from aligner.data.types import Completion
from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig
from aligner.values import is_finite_number

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Ask:
    """A completion that the agent has requested."""

    read: Tensor
    """int64 [T]: the input tokens."""
    most_tokens: int
    """Maximum number of tokens of the completion; the context may leave fewer."""
    completion: "asyncio.Task[Completion]"
    """The task that generates the completion."""


@dataclass(frozen=True)
class AgentTurn:
    """A completion that the agent has received, with its input."""

    read: Tensor
    """int64 [T]: the input tokens of the policy."""
    response: Completion
    """The completion."""
    conversation: Conversation | None
    """The chat messages of the request; None for a text completion."""
    said: tuple[str, ...]
    """Keys of the request's messages and of the answer, for the comparison with the messages of
    later requests; see `compared`."""
    text: str
    """Prompt and completion of a text completion that a later prompt can continue, else empty."""

    @property
    def drawn(self) -> Tensor:
        """int64 [R]: the response's tokens."""
        return self.response.tokens


@dataclass(frozen=True)
class SessionMeans:
    """Objects and settings that all sessions share."""

    tokenizer: Tokenizer
    chat: Callable[[], ChatTurns]
    """Function that returns the chat template. Raises ConfigError for a model without one."""
    settings: EnvironmentConfig
    """The section `environment` of the configuration."""
    context: int
    """Maximum number of input and generated tokens of one sequence."""
    told: set[str] = field(default_factory=set)
    """Ignored parameters and branch reasons that have been logged; each is logged only once."""


@dataclass
class AgentSession:
    """One episode of an agent, and the turns that the agent has received so far.

    The input tokens of a request depend only on its messages or text and on the tokens generated
    before, and so does the completion; timing has no effect. If an agent fails and is started
    again, the new attempt starts without turns (see `begin`).
    """

    name: str
    """Name of the episode, part of its URL."""
    means: SessionMeans
    generate: Callable[[Tensor, int, int], Coroutine[Any, Any, Completion]]
    """Function that generates a completion. Its arguments are the input tokens, int64 [T], the
    maximum number of generated tokens, and the number of earlier requests with the same input."""
    end: Callable[[], None]
    """Function that ends the episode with its current turns."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """API key of the worker process that runs the agent; it authorizes the start of an attempt."""
    agent_key: str | None = None
    """API key of the current attempt of the agent; None before the first attempt."""
    turns: list[AgentTurn] = field(default_factory=list)
    """Turns of the current attempt, in the order of their delivery."""
    reward: float = 0.0
    """Sum of the rewards that the agent has reported in the current attempt."""
    is_cut: bool = False
    """Whether a limit on turns or on tokens has truncated the episode."""
    branches: Counter[str] = field(default_factory=Counter)
    """Number of requests that started a new branch, by reason."""

    def __post_init__(self) -> None:
        # number of requested completions, by the bytes of their input tokens
        self._asked = Counter[bytes]()
        # completions whose clients have disconnected; the next identical request gets one
        self._left: list[Ask] = []
        # tasks of the completions in flight
        self._waiting = set[asyncio.Task[Completion]]()

    def begin(self) -> str:
        """Start an attempt of the agent without turns and reward; return its API key.

        Raises:
            Refused: An earlier attempt has failed after a limit had truncated it. The episode ends
                with the turns of that attempt, and the agent is not started again.
        """
        if self.is_cut and self.turns:
            self.end()
            raise Refused(409, f"episode {self.name} is over")
        self.__post_init__()
        self.turns = []
        self.reward = 0.0
        # requests of an earlier attempt have another key and get the status 401
        self.agent_key = secrets.token_urlsafe(16)
        return self.agent_key

    def close(self) -> None:
        """Cancel the completions in flight; their requests get the status 401."""
        for completion in [*self._waiting]:
            completion.cancel()

    async def answer(self, body: CompletionBody) -> list[Answer]:
        """Return `body.n` answers to a request, and record each as a turn.

        If this coroutine is cancelled, the completions continue, and the next request with the same
        input gets them. A retry after a disconnect therefore generates no second completion.

        Raises:
            Refused: The request is invalid, the episode has reached its maximum number of turns, or
                the episode has ended.
        """
        for name in {*body.ignored} - self.means.told:
            self.means.told.add(name)
            _log.warning("agent requests set %s, which is ignored; set rollout.* instead", name)

        attempt = self.agent_key
        # requests count when they arrive, so that concurrent requests cannot exceed the limit
        if self._asked.total() + body.n > self.means.settings.max_turns:
            self.is_cut = True
            self.end()
            limit = self.means.settings.max_turns
            raise Refused(
                400,
                f"episode {self.name} is over: it reached environment.max_turns={limit}",
                "episode_over",
            )

        try:
            conversation, read = self._read(body)
        except Refused:
            raise
        except AlignerError as error:
            raise Refused(400, str(error)) from error
        if len(read) >= self.means.context:
            return self._overflow(len(read), body.n)

        limit = self.means.settings.max_turn_tokens
        limit = min(limit, body.limit or limit)
        asks = [self._ask(read, limit) for _ in range(body.n)]
        try:
            await asyncio.wait([ask.completion for ask in asks])
        except asyncio.CancelledError:
            self._left += asks
            raise
        # `begin` may have started another attempt while the engine was generating
        if attempt != self.agent_key or any(ask.completion.cancelled() for ask in asks):
            raise Refused(
                401, f"episode {self.name} is over, or its agent was restarted", "invalid_api_key"
            )
        return [self._given(body, conversation, ask) for ask in asks]

    def _read(self, body: CompletionBody) -> tuple[Conversation | None, Tensor]:
        """Return the chat of a request, None for a text completion, and its input tokens.

        The input tokens, int64 [T], contain the tokens of the continued turn unchanged.
        """
        if isinstance(body, ChatBody):
            conversation = self._conversation(body)
            return conversation, conversation.tokens
        assert isinstance(body, TextBody)
        if isinstance(body.prompt, list):
            size = self.means.tokenizer.vocab_size
            if not body.prompt or not all(0 <= token < size for token in body.prompt):
                raise Refused(
                    400, f"prompt: must have at least one token id, each between 0 and {size - 1}"
                )
            return None, torch.tensor(body.prompt, dtype=torch.int64)

        text = body.prompt
        tokenizer = self.means.tokenizer
        if not text:
            raise Refused(400, "prompt: must not be empty")
        candidates = [turn for turn in self.turns if turn.text and text.startswith(turn.text)]
        if not candidates:
            if self.turns:
                self._branch("the request does not continue an earlier turn")
            return None, tokenizer.encode(text, add_bos=True)

        # the tokens break ties, so that the choice does not depend on the order of the turns
        turn = max(
            candidates, key=lambda candidate: (len(candidate.text), candidate.drawn.tolist())
        )
        tokens = torch.cat([turn.read, turn.drawn])
        added = tokenizer.encode_observation(tokens, text[len(turn.text) :])
        return None, torch.cat([tokens, added])

    def _conversation(self, body: ChatBody) -> Conversation:
        """Return the chat of a request, which continues the longest matching earlier turn.

        A turn matches if the request begins with its messages and has the same tools and template
        variables. Without a matching turn, or if the messages cannot be appended to its tokens, the
        whole chat is rendered again, and the request starts a new branch.
        """
        rules = self.means.settings.matching
        chat = self.means.chat()
        messages = template_messages(body.messages)
        tools = body.tools or None
        variables = body.chat_template_kwargs or {}
        message_keys = tuple(compared(message, rules) for message in body.messages)
        candidates = [
            turn
            for turn in self.turns
            if turn.conversation is not None
            and turn.conversation.tools == tools
            and turn.conversation.variables == variables
            and len(turn.said) < len(message_keys)
            and turn.said == message_keys[: len(turn.said)]
        ]
        if not candidates:
            if self.turns:
                self._branch("the request does not continue an earlier turn")
            return chat.begin(messages, tools, variables)

        turn = max(
            candidates, key=lambda candidate: (len(candidate.said), candidate.drawn.tolist())
        )
        assert turn.conversation is not None
        try:
            conversation = chat.append_turn(
                turn.conversation, turn.drawn, messages[len(turn.said) :]
            )
        except AlignerError as error:
            # without its end-of-turn token, no message can follow the turn
            self._branch("an earlier turn was truncated and cannot be continued", str(error))
            return chat.begin(messages, tools, variables)
        if isinstance(conversation, NewBranch):
            self._branch("the messages cannot be appended to the earlier turn", conversation.reason)
            return conversation.conversation
        return conversation

    def _branch(self, kind: str, reason: str = "") -> None:
        """Count a request that starts a new branch, and log the first one of each kind."""
        self.branches[kind] += 1
        if kind not in self.means.told:
            self.means.told.add(kind)
            _log.info(
                "episode %s starts a new branch: %s%s (later branches with this reason are not"
                " logged)",
                self.name,
                kind,
                f" ({reason})" * bool(reason),
            )

    def _overflow(self, length: int, count: int) -> list[Answer]:
        """Return `count` empty answers to a prompt that leaves no room for a token.

        Raises Refused if the episode has no turns yet.
        """
        if not self.turns:
            limit = self.means.context
            raise Refused(
                400,
                f"the prompt has {length} tokens; must have at most {limit - 1} to leave room for a"
                " response",
                "context_length_exceeded",
            )
        self.is_cut = True
        return [Answer("", "length", length)] * count

    def _ask(self, read: Tensor, most_tokens: int) -> Ask:
        """Return an abandoned completion with the same input, else start a new one."""
        for ask in self._left:
            if (
                ask.most_tokens == most_tokens
                and torch.equal(ask.read, read)
                and not ask.completion.cancelled()
            ):
                self._left.remove(ask)
                return ask

        # repeated requests of the same input get different random numbers
        content = read.numpy().tobytes()
        completion = asyncio.create_task(self.generate(read, most_tokens, self._asked[content]))
        ask = Ask(read, most_tokens, completion)
        self._asked[content] += 1
        self._waiting.add(completion)
        completion.add_done_callback(self._waiting.discard)
        return ask

    def _given(self, body: CompletionBody, conversation: Conversation | None, ask: Ask) -> Answer:
        """Record a completion as a turn, and return it as the answer for the agent."""
        response = ask.completion.result()
        read = ask.read
        text = None
        if (prefix := self._stopped(read, response.tokens, body.stops)) is not None:
            tokens, text = prefix
            response = _shortened(response, tokens)

        # the turn's keys and text depend on the answer, which in turn depends on the turn
        turn = AgentTurn(read, response, conversation, (), "")
        answer = self._answer(body, turn, text)
        full_text = ""
        if isinstance(body, TextBody) and isinstance(body.prompt, str) and not self._ended(turn):
            full_text = body.prompt + self._text_after(read, turn.drawn)
        self.turns.append(replace(turn, said=self._said(body, answer), text=full_text))
        return answer

    def _answer(self, body: CompletionBody, turn: AgentTurn, text: str | None) -> Answer:
        """Return a turn as an answer; `text` is its text up to a stop text, None without one.

        Tool calls become part of the answer only if the turn is complete and all of its calls can
        be parsed; otherwise the answer is the plain text.
        """
        tokenizer = self.means.tokenizer
        generated = turn.drawn
        has_ended = self._ended(turn)
        logprobs = turn.response.logprobs.tolist()
        texts = [tokenizer.decode_token(token) for token in generated.tolist()]
        answer = Answer(
            self._text_after(turn.read, generated[:-1] if has_ended else generated)
            if text is None
            else text,
            "length" if turn.response.finish_reason == "length" else "stop",
            len(turn.read),
            tuple(map(DrawnToken, texts, logprobs)),
        )
        if (
            text is None
            and has_ended
            and turn.conversation is not None
            and isinstance(body, ChatBody)
            and body.calls_tools
        ):
            parsed_turn = self.means.chat().parse_turn(turn.conversation, generated)
            calls = tuple(call for call in parsed_turn.calls if isinstance(call, ToolCall))
            if calls and len(calls) == len(parsed_turn.calls):
                return replace(
                    answer, finish_reason="tool_calls", content=parsed_turn.content, calls=calls
                )
        return answer

    def _ended(self, turn: AgentTurn) -> bool:
        """Return whether the turn's last token is an end-of-sequence token."""
        return bool(self.means.tokenizer.is_eos(turn.drawn[-1:]))

    def _said(self, body: CompletionBody, answer: Answer) -> tuple[str, ...]:
        """Return the keys for `AgentTurn.said`; none for a text completion."""
        messages: Sequence[Any] = (
            [*body.messages, answer.message] if isinstance(body, ChatBody) else ()
        )
        return tuple(compared(message, self.means.settings.matching) for message in messages)

    def _text_after(self, read: Tensor, drawn: Tensor) -> str:
        """Return the text of generated tokens that follow the input tokens `read`."""
        return self.means.tokenizer.decode_after(read, drawn, skip_special_tokens=False)

    def _stopped(self, read: Tensor, drawn: Tensor, stops: Sequence[str]) -> tuple[int, str] | None:
        """Return the number of tokens up to the first stop text, and the text before it.

        Returns None if the completion contains no stop text.
        """
        full_text = self._text_after(read, drawn) if stops else ""
        if not any(stop in full_text for stop in stops):
            return None
        # the shortest prefix of the tokens that contains a stop text; each prefix is decoded
        # as a whole, because a character may consist of several tokens
        for tokens in range(1, len(drawn) + 1):
            text = self._text_after(read, drawn[:tokens])
            if positions := [text.find(stop) for stop in stops if stop in text]:
                return tokens, text[: min(positions)]
        return None


def _shortened(completion: Completion, tokens: int) -> Completion:
    """Return the first `tokens` tokens of a completion that ends with a stop text."""
    return replace(
        completion,
        tokens=completion.tokens[:tokens],
        logprobs=completion.logprobs[:tokens],
        weight_versions=completion.weight_versions[:tokens],
        finish_reason="stop",
        kept=None if completion.kept is None else completion.kept.select(slice(tokens)),
        routes=None,
    )


_Handler = Callable[[AgentSession, Request], Awaitable[Response]]


class AgentServer(OpenAIServer):
    """Endpoint that serves the open sessions under `/episodes/NAME/v1`.

    A request without the API key of an open session gets the status 401.
    """

    def __init__(self, host: str, most_characters: int) -> None:
        """Create an endpoint that is not listening yet.

        Args:
            host: Name or address of this machine that agents can connect to.
            most_characters: Maximum number of characters of a request body.
        """
        self._sessions: dict[str, AgentSession] = {}
        super().__init__(host, 0, most_characters, "environment.endpoint_host")

    def url(self, session: AgentSession) -> str:
        """Return the URL of a session; with `/v1` appended it is the agent's `base_url`."""
        return f"{self.address}/episodes/{session.name}"

    def open(self, session: AgentSession) -> None:
        """Start to serve a session."""
        self.on_loop(self._opened(session))

    def close_session(self, session: AgentSession) -> None:
        """Stop serving a session, which gets no further turns after this method has returned.

        May be called repeatedly.
        """
        self.on_loop(self._closed(session))

    async def _opened(self, session: AgentSession) -> None:
        """Register a session; runs on the server's loop, like all other accesses to sessions."""
        self._sessions[session.name] = session

    async def _closed(self, session: AgentSession) -> None:
        """Remove a session, and cancel its completions in flight."""
        self._sessions.pop(session.name, None)
        session.close()

    def routes(self) -> list[Route]:
        """See `OpenAIServer.routes`."""
        root = "/episodes/{episode}"
        routes = {
            "attempts": ("POST", self._begun),
            "v1/reward": ("POST", self._rewarded),
            "v1/models": ("GET", self._models),
            "v1/chat/completions": ("POST", self._completed),
            "v1/completions": ("POST", self._completed),
        }
        return [
            Route(f"{root}/{path}", self._served(handler), methods=[method])
            for path, (method, handler) in routes.items()
        ]

    def _served(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return a route handler that calls `handler` for requests with the right API key."""

        async def serve(request: Request) -> Response:
            session = self._sessions.get(request.path_params["episode"])
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            expected = None
            if session is not None:
                expected = session.key if handler == self._begun else session.agent_key
            # the comparison takes constant time, so that it does not reveal a prefix of the key
            if (
                session is None
                or expected is None
                or not hmac.compare_digest(key.encode(), expected.encode())
            ):
                raise Refused(
                    401, "no episode in flight has this URL and API key", "invalid_api_key"
                )
            return await handler(session, request)

        return serve

    async def _begun(self, session: AgentSession, request: Request) -> Response:
        """Start an attempt of the agent, and return its API key."""
        return JSONResponse({"api_key": session.begin()})

    async def _models(self, session: AgentSession, request: Request) -> Response:
        """List the policy as the only model."""
        return models_response(MODEL)

    async def _rewarded(self, session: AgentSession, request: Request) -> Response:
        """Add to the reward of the episode, and return the sum."""
        body = parsed(RewardBody, await self.read(request))
        if not is_finite_number(body.reward):
            raise Refused(400, f"reward: must be a finite number, got {body.reward}")
        session.reward += body.reward
        return JSONResponse({"reward": session.reward})

    async def _completed(self, session: AgentSession, request: Request) -> Response:
        """Answer a request for a chat completion or a text completion."""
        kind: type[CompletionBody] = (
            ChatBody if request.url.path.endswith("/chat/completions") else TextBody
        )
        body = parsed(kind, await self.read(request))
        return await self.answer(request, body, session.answer(body), session.name)
