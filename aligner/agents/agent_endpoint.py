"""What one episode's agent has asked of the policy: its turns, and which of them a request goes on
from."""

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
    """int64 [T]: the input tokens"""
    most_tokens: int
    """Maximum number of tokens of the completion; the context may leave fewer."""
    completion: "asyncio.Task[Completion]"


@dataclass(frozen=True)
class AgentTurn:
    """A response that the agent was given."""

    read: Tensor
    """int64 [T]: all that the policy read."""
    response: Completion
    """The completion."""
    conversation: Conversation | None
    """What the policy was to answer; None for a text."""
    said: tuple[str, ...]
    """The messages of that, and the answer, as they are compared with what comes back."""
    text: str
    """The prompt's and the answer's, where the prompt was a text that can go on."""

    @property
    def drawn(self) -> Tensor:
        """int64 [R]: the response's tokens."""
        return self.response.tokens


@dataclass(frozen=True)
class SessionMeans:
    """What all sessions have in common."""

    tokenizer: Tokenizer
    chat: Callable[[], ChatTurns]
    """How chats go on. Raises ConfigError for a model without a chat template."""
    settings: EnvironmentConfig
    context: int
    """Most tokens of what is read and drawn together."""
    told: set[str] = field(default_factory=set)
    """What the log has said once, and need not say again."""


@dataclass
class AgentSession:
    """An episode of an agent's.

    Which tokens a request has read follows from the messages, or the text, and from what was drawn
    before alone; so does what is drawn for it. An agent that is begun anew, after a failure, begins
    with nothing: `begin`.
    """

    name: str
    means: SessionMeans
    generate: Callable[[Tensor, int, int], Coroutine[Any, Any, Completion]]
    """Generates a completion of input tokens, int64 [T], with a maximum number of tokens; the last
    argument says how often the episode has requested a completion of these tokens before."""
    end: Callable[[], None]
    """End the episode as it is, cut."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Of the process that runs agents, with which it begins them."""
    agent_key: str | None = None
    """Of the agent that was begun last."""
    turns: list[AgentTurn] = field(default_factory=list)
    reward: float = 0.0
    is_cut: bool = False
    """Whether a limit has ended what the policy or the agent would have gone on with."""
    branches: Counter[str] = field(default_factory=Counter)
    """How often a request did not go on from what there was, by the reasons."""

    def __post_init__(self) -> None:
        self._asked = Counter[bytes]()
        self._left: list[Ask] = []
        """Whose clients have gone: the next one to ask the same gets the answer."""
        self._waiting = set[asyncio.Task[Completion]]()

    def begin(self) -> str:
        """Begin the agent, again where it has failed; what was drawn before is dropped. Returns its
        key.

        One that has failed after it was cut is not begun again: the episode ends there. Raises
        Refused.
        """
        if self.is_cut and self.turns:
            self.end()
            raise Refused(409, f"episode {self.name} is over")
        self.__post_init__()
        self.turns, self.reward, self.agent_key = [], 0.0, secrets.token_urlsafe(16)
        return self.agent_key

    def close(self) -> None:
        """Have those who still wait for an answer get none."""
        for completion in [*self._waiting]:
            completion.cancel()

    async def answer(self, body: CompletionBody) -> list[Answer]:
        """The answers to a request, `body.n` of them. Raises Refused.

        Where it is cancelled nobody has got them, and who asks the same next gets what is drawn.
        """
        for name in {*body.ignored} - self.means.told:
            self.means.told.add(name)
            _log.warning("agent requests set %s, which is ignored; set rollout.* instead", name)
        attempt = self.agent_key
        if self._asked.total() + body.n > self.means.settings.max_turns:
            self.is_cut = True
            self.end()
            most = self.means.settings.max_turns
            raise Refused(
                400,
                f"episode {self.name} is over: it reached environment.max_turns={most}",
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
        most = self.means.settings.max_turn_tokens
        most = min(most, body.limit or most)
        asks = [self._ask(read, most) for _ in range(body.n)]
        try:
            await asyncio.wait([ask.completion for ask in asks])
        except asyncio.CancelledError:
            self._left += asks
            raise
        if attempt != self.agent_key or any(ask.completion.cancelled() for ask in asks):
            raise Refused(
                401, f"episode {self.name} is over, or its agent was restarted", "invalid_api_key"
            )
        return [self._given(body, conversation, ask) for ask in asks]

    def _read(self, body: CompletionBody) -> tuple[Conversation | None, Tensor]:
        """What the policy is to answer, as tokens, int64 [T]; those that it has drawn and read as
        they were."""
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
        text, tokenizer = body.prompt, self.means.tokenizer
        if not text:
            raise Refused(400, "prompt: must not be empty")
        before = [turn for turn in self.turns if turn.text and text.startswith(turn.text)]
        if not before:
            if self.turns:
                self._branch("the request does not continue an earlier turn")
            return None, tokenizer.encode(text, add_bos=True)
        turn = max(before, key=lambda each: (len(each.text), each.drawn.tolist()))
        tokens = torch.cat([turn.read, turn.drawn])
        added = tokenizer.encode_observation(tokens, text[len(turn.text) :])
        return None, torch.cat([tokens, added])

    def _conversation(self, body: ChatBody) -> Conversation:
        """The messages as what goes on from the longest conversation that they begin with, or
        anew."""
        rules, chat = self.means.settings.matching, self.means.chat()
        messages, tools = template_messages(body.messages), body.tools or None
        variables = body.chat_template_kwargs or {}
        said = tuple(compared(message, rules) for message in body.messages)
        before = [
            turn
            for turn in self.turns
            if turn.conversation is not None
            and turn.conversation.tools == tools
            and turn.conversation.variables == variables
            and len(turn.said) < len(said)
            and turn.said == said[: len(turn.said)]
        ]
        if not before:
            if self.turns:
                self._branch("the request does not continue an earlier turn")
            return chat.begin(messages, tools, variables)
        turn = max(before, key=lambda each: (len(each.said), each.drawn.tolist()))
        assert turn.conversation is not None
        try:
            found = chat.append_turn(turn.conversation, turn.drawn, messages[len(turn.said) :])
        except AlignerError as error:
            self._branch("an earlier turn was truncated and cannot be continued", str(error))
            return chat.begin(messages, tools, variables)
        if isinstance(found, NewBranch):
            self._branch("the messages cannot be appended to the earlier turn", found.reason)
            return found.conversation
        return found

    def _branch(self, kind: str, reason: str = "") -> None:
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
        """Empty answers where there is no room for a token."""
        if not self.turns:
            most = self.means.context
            raise Refused(
                400,
                f"the prompt has {length} tokens; must have at most {most - 1} to leave room for a"
                " response",
                "context_length_exceeded",
            )
        self.is_cut = True
        return [Answer("", "length", length)] * count

    def _ask(self, read: Tensor, most_tokens: int) -> Ask:
        for ask in self._left:
            if (
                ask.most_tokens == most_tokens
                and torch.equal(ask.read, read)
                and not ask.completion.cancelled()
            ):
                self._left.remove(ask)
                return ask
        content = read.numpy().tobytes()
        completion = asyncio.create_task(self.generate(read, most_tokens, self._asked[content]))
        ask = Ask(read, most_tokens, completion)
        self._asked[content] += 1
        self._waiting.add(completion)
        completion.add_done_callback(self._waiting.discard)
        return ask

    def _given(self, body: CompletionBody, conversation: Conversation | None, ask: Ask) -> Answer:
        """Note a response as a turn; the agent is given it now."""
        response, read, text = ask.completion.result(), ask.read, None
        if (stopped := self._stopped(read, response.tokens, body.stops)) is not None:
            tokens, text = stopped
            response = _shortened(response, tokens)
        turn = AgentTurn(read, response, conversation, (), "")
        answer = self._answer(body, turn, text)
        whole = ""
        if isinstance(body, TextBody) and isinstance(body.prompt, str) and not self._ended(turn):
            whole = body.prompt + self._text_after(read, turn.drawn)
        self.turns.append(replace(turn, said=self._said(body, answer), text=whole))
        return answer

    def _answer(self, body: CompletionBody, turn: AgentTurn, text: str | None) -> Answer:
        """A turn in words; `text` is what it says where that is not all."""
        tokenizer, drawn, ended = self.means.tokenizer, turn.drawn, self._ended(turn)
        logprobs = turn.response.logprobs.tolist()
        told = [tokenizer.decode_token(token) for token in drawn.tolist()]
        answer = Answer(
            self._text_after(turn.read, drawn[:-1] if ended else drawn) if text is None else text,
            "length" if turn.response.finish_reason == "length" else "stop",
            len(turn.read),
            tuple(map(DrawnToken, told, logprobs)),
        )
        if (
            text is None
            and ended
            and turn.conversation is not None
            and isinstance(body, ChatBody)
            and body.calls_tools
        ):
            said = self.means.chat().parse_turn(turn.conversation, drawn)
            calls = tuple(call for call in said.calls if isinstance(call, ToolCall))
            if calls and len(calls) == len(said.calls):
                return replace(
                    answer, finish_reason="tool_calls", content=said.content, calls=calls
                )
        return answer

    def _ended(self, turn: AgentTurn) -> bool:
        return bool(self.means.tokenizer.is_eos(turn.drawn[-1:]))

    def _said(self, body: CompletionBody, answer: Answer) -> tuple[str, ...]:
        messages: Sequence[Any] = (
            [*body.messages, answer.message] if isinstance(body, ChatBody) else ()
        )
        return tuple(compared(message, self.means.settings.matching) for message in messages)

    def _text_after(self, read: Tensor, drawn: Tensor) -> str:
        """Return the text of generated tokens behind the tokens that the model read."""
        return self.means.tokenizer.decode_after(read, drawn, skip_special_tokens=False)

    def _stopped(self, read: Tensor, drawn: Tensor, stops: Sequence[str]) -> tuple[int, str] | None:
        """How many tokens there are up to the first of these texts, and their text before it; None
        where there is none."""
        whole = self._text_after(read, drawn) if stops else ""
        if not any(stop in whole for stop in stops):
            return None
        for tokens in range(1, len(drawn) + 1):
            text = self._text_after(read, drawn[:tokens])
            if found := [text.find(stop) for stop in stops if stop in text]:
                return tokens, text[: min(found)]
        return None


def _shortened(completion: Completion, tokens: int) -> Completion:
    """Return the first tokens of a completion, which then ends with a stop text."""
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
    """Serves sessions that are open, under `/episodes/NAME/v1`; what has no key of its own gets
    401."""

    def __init__(self, host: str, most_characters: int) -> None:
        """`host` is this machine's name or address, as agents reach it; bodies of more than
        `most_characters` are refused."""
        self._sessions: dict[str, AgentSession] = {}
        super().__init__(host, 0, most_characters, "environment.endpoint_host")

    def url(self, session: AgentSession) -> str:
        """Where a session is served; its agent's `base_url` is this and `/v1`."""
        return f"{self.address}/episodes/{session.name}"

    def open(self, session: AgentSession) -> None:
        """Serve a session."""
        self.on_loop(self._opened(session))

    def close_session(self, session: AgentSession) -> None:
        """Serve it no more; when this returns it has all the turns that it will have. May be
        repeated."""
        self.on_loop(self._closed(session))

    async def _opened(self, session: AgentSession) -> None:
        self._sessions[session.name] = session

    async def _closed(self, session: AgentSession) -> None:
        self._sessions.pop(session.name, None)
        session.close()

    def routes(self) -> list[Route]:
        """As `OpenAIServer`."""
        root = "/episodes/{episode}"
        routes = {
            "attempts": ("POST", self._begun),
            "v1/reward": ("POST", self._rewarded),
            "v1/models": ("GET", self._models),
            "v1/chat/completions": ("POST", self._completed),
            "v1/completions": ("POST", self._completed),
        }
        return [
            Route(f"{root}/{path}", self._served(each), methods=[method])
            for path, (method, each) in routes.items()
        ]

    def _served(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """A handler for requests with the session's key."""

        async def serve(request: Request) -> Response:
            session = self._sessions.get(request.path_params["episode"])
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            expected = None
            if session is not None:
                expected = session.key if handler == self._begun else session.agent_key
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
        return JSONResponse({"api_key": session.begin()})

    async def _models(self, session: AgentSession, request: Request) -> Response:
        return models_response(MODEL)

    async def _rewarded(self, session: AgentSession, request: Request) -> Response:
        body = parsed(RewardBody, await self.read(request))
        if not is_finite_number(body.reward):
            raise Refused(400, f"reward: must be a finite number, got {body.reward}")
        session.reward += body.reward
        return JSONResponse({"reward": session.reward})

    async def _completed(self, session: AgentSession, request: Request) -> Response:
        kind: type[CompletionBody] = (
            ChatBody if request.url.path.endswith("/chat/completions") else TextBody
        )
        body = parsed(kind, await self.read(request))
        return await self.answer(request, body, session.answer(body), session.name)
