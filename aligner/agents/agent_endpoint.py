"""Model server for the agents of a rank.

`AgentSession` contains the turns of one agent episode. It decides which earlier turn a request
continues, so that the policy reads the tokens that it generated, never a second tokenization of
their text. `AgentServer` serves all open sessions over HTTP, each at its own URL and with its own
API key, in a thread of the rank's process.
"""

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
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
from aligner.agents.episode_credit import EpisodeCredit, MetricsBody, RewardBody
from aligner.agents.episode_identity import EpisodeIdentity
from aligner.agents.message_matching import (
    build_comparison_key,
    describe_difference,
    get_continued_text,
    to_template_messages,
)
from aligner.agents.model_server import ModelServer, has_key
from aligner.agents.protocols.requests import (
    Answer,
    ChatRequest,
    ModelRequest,
    RequestError,
    SamplingParameters,
    TextRequest,
    build_refusal,
)
from aligner.agents.protocols.response_store import ResponseStore
from aligner.agents.protocols.wire_format import parse_body
from aligner.agents.response_grammars import build_request_grammar
from aligner.agents.session_context import SessionContext
from aligner.agents.untrained_requests import GenerateUntrained, UntrainedRequests
from aligner.data.chat_turns import Conversation, NewBranch
from aligner.data.types import Completion
from aligner.errors import AlignerError

_log = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""Model name that `/v1/models` lists; requests may contain any other name."""


@dataclass(frozen=True, eq=False)
class _PreparedPrompt:
    """The input of a request, and the grammar that it requires."""

    conversation: Conversation | None
    """The rendered chat; None for a text completion."""
    tokens: Tensor
    """Input tokens, int64 [T]."""
    grammar: str | None
    """Grammar of the answers; None if the request requires none."""


@dataclass(eq=False)
class PendingCompletion:
    """A completion that the agent has requested."""

    input_tokens: Tensor
    """Input tokens, int64 [T]."""
    repeats: int
    """Number of earlier completions with the same input."""
    task: "asyncio.Task[Completion]"
    """The task that generates the completion."""


@dataclass(eq=False)
class _PendingAnswers:
    """The answers to a request, from the start of their generation."""

    request: ModelRequest
    conversation: Conversation | None
    """The rendered chat; None for a text completion."""
    completions: Sequence[PendingCompletion]
    answers: list[Answer] | None = None
    """The answers, which have been recorded as turns; None before."""
    turns: Sequence[int] = ()
    """Index of the turn of each answer; empty before, and for answers without tokens."""

    @property
    def has_failed(self) -> bool:
        """Whether a completion was cancelled, or its generation failed."""
        done_tasks = (each.task for each in self.completions if each.task.done())
        return any(task.cancelled() or task.exception() is not None for task in done_tasks)


@dataclass(frozen=True)
class AgentTurn:
    """A completion that the agent has received, with its input."""

    input_tokens: Tensor
    """Input tokens of the policy, int64 [T]."""
    response: Completion
    """The generated tokens with their log-probs."""
    conversation: Conversation | None
    """The chat messages of the request; None for a text completion."""
    message_keys: tuple[str, ...]
    """Keys of the request's messages and of the answer, for the comparison with the messages of
    later requests; see `build_comparison_key`."""
    text: str
    """Prompt and completion of a text completion that a later prompt can continue, else empty."""
    reward: float = 0.0
    """Sum of the rewards of the turn."""

    @property
    def generated_tokens(self) -> Tensor:
        """Tokens of the response, int64 [R]."""
        return self.response.tokens


@dataclass
class AgentSession:
    """One episode of an agent, and the turns that the agent has received so far.

    The input tokens of a request depend only on its messages or text and on the tokens generated
    before, and so does the completion; timing has no effect. If an agent fails and is started
    again, the new attempt starts without turns (see `start_attempt`).
    """

    name: str
    """Name of the episode, part of its URL and of the ids of its responses."""
    context: SessionContext
    generate: Callable[
        [Tensor, int, tuple[str, ...], str | None, int], Coroutine[Any, Any, Completion]
    ]
    """Function that generates a completion. Its arguments are the input tokens, int64 [T], the
    maximum number of generated tokens, the stop strings and the grammar of the request, and the
    number of earlier requests with the same input."""
    check_completion: Callable[[tuple[str, ...], str | None], None]
    """Function that raises AlignerError if the engine cannot generate a completion with these stop
    strings and this grammar."""
    generate_untrained: GenerateUntrained
    """Function that generates the answer to a request that is not trained on."""
    end_episode: Callable[[], None]
    """Function that ends the episode with its current turns."""
    identity: EpisodeIdentity
    """Seed, prompt and sample index of the episode."""
    worker_key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """API key of the worker process that runs the agent; it authorizes the start of an attempt."""
    agent_key: str | None = None
    """API key of the current attempt of the agent; None before the first attempt."""
    turns: list[AgentTurn] = field(default_factory=list)
    """Turns of the current attempt, in the order of their delivery."""
    credit: EpisodeCredit = field(default_factory=EpisodeCredit)
    """Rewards and metrics that the agent has reported in the current attempt."""
    has_server_error: bool = False
    """Whether a request of the current attempt has failed with a server error (status 5xx), or was
    refused because the server has too many requests (status 429)."""
    is_truncated: bool = False
    """Whether a limit on turns, tokens or untrained requests has truncated the episode."""
    branch_counts: Counter[str] = field(default_factory=Counter)
    """Number of requests that started a new branch, by reason."""
    model_name: str = MODEL_NAME
    """Name of the model that the session serves."""

    def __post_init__(self) -> None:
        self._answer_builder = AnswerBuilder(self.context.tokenizer, self.context.get_chat)
        self.stored_responses = ResponseStore()
        """Responses of the current attempt that requests of the Responses API may continue."""
        self._untrained_requests = UntrainedRequests(
            self.context, self._answer_builder, self.generate_untrained
        )
        # number of requested completions, by the bytes of their input tokens
        self._request_counts = Counter[bytes]()
        # answers that have been sent, by the ids of their requests
        self._sent_answers: dict[str, _PendingAnswers] = {}
        # answers whose clients have disconnected; a repetition of the request gets them
        self._unreceived_answers: list[_PendingAnswers] = []
        # tasks of the completions in flight
        self._tasks_in_flight = set[asyncio.Task[Completion]]()
        # requests are tokenized one after another, in the order of their arrival
        self._tokenization_lock = asyncio.Lock()
        # requests whose tokens are being computed; not counted in `_request_counts` yet
        self._requests_in_tokenization: list[ModelRequest] = []

    def start_attempt(self) -> str:
        """Start an attempt of the agent without turns, rewards and metrics; return its API key.

        Raises:
            RequestError: An earlier attempt has failed after a limit had truncated it. The episode
                ends with the turns of that attempt, and the agent is not started again.
        """
        if self.is_truncated and self.turns:
            self.end_episode()
            raise RequestError(409, f"episode {self.name} is over")
        self._untrained_requests.cancel()
        # Without the counts of the failed attempt, this attempt has the same random numbers as
        # in a run in which the agent did not fail.
        self.__post_init__()
        self.turns = []
        self.credit = EpisodeCredit()
        self.has_server_error = False
        # requests of an earlier attempt have another key and get the status 401
        self.agent_key = secrets.token_urlsafe(16)
        return self.agent_key

    def close(self) -> None:
        """Cancel the completions in flight; their requests get the status 401."""
        # a request whose tokens are being computed must not start a completion
        self.agent_key = None
        # a copy, because finished tasks remove themselves from the set
        for task in [*self._tasks_in_flight]:
            task.cancel()
        self._untrained_requests.cancel()

    async def answer(self, request: ModelRequest) -> list[Answer]:
        """Return `request.n` answers to a request, and record each as a turn if it is trained on.

        If this coroutine is cancelled, the completions continue, and the next equal request gets
        them. A retry after a disconnect therefore generates no second completion; see also
        `mark_unreceived`.

        Raises:
            RequestError: The request is invalid, the episode has reached its maximum number of
                turns or of untrained requests, or the episode has ended.
        """
        try:
            if not request.is_trained:
                return await self._answer_untrained(request)
            return await self._answer(request)
        except RequestError:
            raise
        except Exception:  # the server answers with the status 500
            self.has_server_error = True
            raise

    async def _answer(self, request: ModelRequest) -> list[Answer]:
        """Return the answers to a request; see `answer`."""
        self._check_supported(request)
        attempt_key = self.agent_key
        pending = self._take_unreceived(request)
        if pending is None:
            pending = await self._start_answers(request)
        if pending.answers is None:
            try:
                await asyncio.wait([each.task for each in pending.completions])
            except asyncio.CancelledError:
                # the client has disconnected; `wait` leaves the tasks running
                if attempt_key == self.agent_key:
                    self._unreceived_answers.append(pending)
                raise
            # `start_attempt` may have started another attempt while the engine was generating
            if attempt_key != self.agent_key or any(
                each.task.cancelled() for each in pending.completions
            ):
                raise self._build_end_error()
            first_turn = len(self.turns)
            pending.answers = [
                self._record_turn(request, pending.conversation, completion)
                for completion in pending.completions
            ]
            pending.turns = range(first_turn, len(self.turns))
        self.credit.add_response(request.id, pending.turns)
        self._sent_answers[request.id] = pending
        return pending.answers

    def mark_refused(self) -> None:
        """See `aligner.agents.model_server.Backend.mark_refused`."""
        self.has_server_error = True

    def mark_unreceived(self, request: ModelRequest) -> None:
        """See `aligner.agents.model_server.Backend.mark_unreceived`.

        The turns remain. A repetition of the request gets the same answers, once.
        """
        if not request.is_trained:
            self._untrained_requests.mark_unreceived(request)
            return
        pending = self._sent_answers.pop(request.id, None)
        # an earlier attempt may have sent the request
        if pending is not None:
            self._unreceived_answers.append(pending)

    def _take_unreceived(self, request: ModelRequest) -> _PendingAnswers | None:
        """Return answers to an equal request that its client has not received; None without any."""
        for pending in self._unreceived_answers:
            is_equal = _normalize(pending.request) == _normalize(request)
            if is_equal and not pending.has_failed:
                self._unreceived_answers.remove(pending)
                return pending
        return None

    async def _start_answers(self, request: ModelRequest) -> _PendingAnswers:
        """Start to generate the answers to a request.

        Raises RequestError as `answer` does.
        """
        attempt_key = self.agent_key
        # requests count when they arrive, so that concurrent requests cannot exceed the limit
        answers_requested = self._request_counts.total()
        answers_requested += sum(each.n for each in self._requests_in_tokenization)
        if answers_requested + request.n > self.context.settings.max_turns:
            raise self._end_at_limit("max_turns", self.context.settings.max_turns)

        # `start_attempt` replaces the list of the attempt
        requests_in_tokenization = self._requests_in_tokenization
        requests_in_tokenization.append(request)
        try:
            # `_tokenize` reads the turns, so requests are tokenized one after another
            async with self._tokenization_lock:
                prompt = await prepare(request, lambda: self._prepare(request))
        except RequestError:
            raise
        except AlignerError as error:
            raise build_refusal(error) from error
        finally:
            requests_in_tokenization.remove(request)
        if attempt_key != self.agent_key:
            raise self._build_end_error()
        if len(prompt.tokens) >= self.context.max_sequence_length:
            answers = self._answer_overflow(request, len(prompt.tokens))
            return _PendingAnswers(request, prompt.conversation, (), answers)

        max_tokens = self.context.settings.max_turn_tokens
        max_tokens = min(max_tokens, request.max_tokens or max_tokens)
        completions = [
            self._start_completion(prompt, max_tokens, request.stop) for _ in range(request.n)
        ]
        return _PendingAnswers(request, prompt.conversation, completions)

    async def _answer_untrained(self, request: ModelRequest) -> list[Answer]:
        """Return the answers to a request that is not trained on; see `answer`."""
        limit = self.context.settings.max_untrained_requests
        if self._untrained_requests.answers_requested + request.n > limit:
            raise self._end_at_limit("max_untrained_requests", limit)
        attempt_key = self.agent_key
        answers = await self._untrained_requests.answer(request)
        if answers is None or attempt_key != self.agent_key:
            raise self._build_end_error()
        self.credit.add_response(request.id, ())
        return answers

    def _end_at_limit(self, key: str, limit: int) -> RequestError:
        """End the episode as truncated, because it has reached a limit of the configuration; return
        the error of the request that exceeds the limit."""
        self.is_truncated = True
        self.end_episode()
        return RequestError(
            400,
            f"episode {self.name} is over: it reached environment.{key}={limit}",
            "episode_over",
        )

    def get_rewarded_turns(self) -> list[AgentTurn]:
        """Return the turns of the current attempt with their rewards."""
        rewards = self.credit.turn_rewards
        return [
            replace(turn, reward=rewards.get(index, 0.0)) for index, turn in enumerate(self.turns)
        ]

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of input tokens of a chat. Raises RequestError."""
        try:
            return len(begin_conversation(request, self.context.get_chat()).tokens)
        except RequestError:
            raise
        except AlignerError as error:
            raise RequestError(400, str(error)) from error

    def _check_supported(self, request: ModelRequest) -> None:
        """Log ignored parameters of a request.

        Raises RequestError if the request would change the distribution that the run trains on.
        """
        for name in {*request.sampling.names} - self.context.logged_messages:
            self.context.logged_messages.add(name)
            setting = self.context.sampling_settings.get(name)
            advice = "" if setting is None else f"; set {setting} instead"
            _log.warning("agent requests set %s, which is ignored%s", name, advice)
        problem = find_prompt_problem(request) or _find_distribution_problem(request)
        if problem is not None:
            raise RequestError(
                400, f"{problem}; other values are not supported in training", "unsupported"
            )

    def _build_end_error(self) -> RequestError:
        """Return the error of a request whose attempt ended before its answer."""
        return RequestError(
            401, f"episode {self.name} is over, or its agent was restarted", "invalid_api_key"
        )

    def _prepare(self, request: ModelRequest) -> _PreparedPrompt:
        """Return the input tokens of a request, and the grammar of its answers.

        Raises AlignerError, before anything is generated, if the request cannot be answered.
        """
        conversation, tokens = self._tokenize(request)
        text = None if conversation is None else conversation.text
        grammar = build_request_grammar(
            request, text, self.context.tokenizer, self.context.get_chat
        )
        self.check_completion(request.stop, grammar)
        return _PreparedPrompt(conversation, tokens, grammar)

    def _tokenize(self, request: ModelRequest) -> tuple[Conversation | None, Tensor]:
        """Return the chat of a request, None for a text completion, and its input tokens.

        The input tokens, int64 [T], contain the tokens of the continued turn unchanged.
        """
        if isinstance(request, ChatRequest):
            conversation = self._build_conversation(request)
            return conversation, conversation.tokens
        assert isinstance(request, TextRequest)
        if not isinstance(request.prompt, str):
            return None, check_prompt_tokens(request.prompt, self.context.tokenizer.vocab_size)

        text = request.prompt
        tokenizer = self.context.tokenizer
        if not text:
            raise RequestError(400, "prompt: must not be empty")
        matching_turns = [turn for turn in self.turns if turn.text and text.startswith(turn.text)]
        if not matching_turns:
            if self.turns:
                self._count_branch("the request does not continue an earlier turn")
            return None, tokenizer.encode(text, add_bos=True)

        # the tokens break ties, so that the choice does not depend on the order of the turns
        turn = max(
            matching_turns,
            key=lambda candidate: (len(candidate.text), candidate.generated_tokens.tolist()),
        )
        tokens = torch.cat([turn.input_tokens, turn.generated_tokens])
        # only the text after the turn is tokenized, so that the turn keeps the tokens that the
        # policy generated
        observation = tokenizer.encode_observation(tokens, text[len(turn.text) :])
        return None, torch.cat([tokens, observation])

    def _build_conversation(self, request: ChatRequest) -> Conversation:
        """Return the chat of a request, which continues the longest matching earlier turn.

        A turn matches if the request begins with its messages and has the same tools and template
        variables. Without a matching turn, or if the messages cannot be appended to its tokens, the
        whole chat is rendered again, and the request starts a new branch.
        """
        chat = self.context.get_chat()
        messages = to_template_messages(request.messages)
        if not request.continue_final_message:
            return self._continue_conversation(request, messages)

        turn_start = get_continued_text(request)
        for turn in self._find_turns(request, request.messages):
            if len(turn.message_keys) == len(messages):
                # a truncated turn keeps the tokens that the policy generated
                assert turn.conversation is not None
                conversation = chat.continue_turn(turn.conversation, turn.generated_tokens)
                if conversation.turn_start == turn_start:
                    return conversation
        return chat.begin_turn(self._continue_conversation(request, messages[:-1]), turn_start)

    def _find_turns(
        self, request: ChatRequest, messages: Sequence[Mapping[str, Any]]
    ) -> list[AgentTurn]:
        """Return the earlier turns with whose messages, including the answer, a chat begins.

        The turns with the most messages come first.

        Args:
            request: The request, whose tools and template variables must be those of the turn.
            messages: The messages of the chat.
        """
        tools = [dict(tool) for tool in request.tools] or None
        message_keys = self._build_message_keys(messages)
        matching_turns = [
            turn
            for turn in self.turns
            if turn.conversation is not None
            and turn.conversation.tools == tools
            and turn.conversation.variables == request.chat_template_kwargs
            and turn.message_keys == message_keys[: len(turn.message_keys)]
        ]
        # the tokens break ties, as in `_tokenize`
        return sorted(
            matching_turns,
            key=lambda turn: (len(turn.message_keys), turn.generated_tokens.tolist()),
            reverse=True,
        )

    def _continue_conversation(
        self, request: ChatRequest, messages: Sequence[Mapping[str, Any]]
    ) -> Conversation:
        """Return the chat of a request without the message that the answer continues.

        See `_build_conversation`. `messages` are the messages in the format of chat templates.
        """
        chat = self.context.get_chat()
        tools = [dict(tool) for tool in request.tools] or None
        variables = request.chat_template_kwargs
        # a turn without new messages after it cannot be continued
        matching_turns = self._find_turns(request, request.context_messages[:-1])
        if not matching_turns:
            if self.turns:
                self._count_branch(
                    "the request does not continue an earlier turn",
                    self._describe_mismatch(
                        self._build_message_keys(request.context_messages), tools, variables
                    ),
                )
            return chat.begin(messages, tools, variables)

        turn = matching_turns[0]
        assert turn.conversation is not None
        try:
            conversation = chat.append_turn(
                turn.conversation, turn.generated_tokens, messages[len(turn.message_keys) :]
            )
        except AlignerError as error:
            # without its end-of-turn token, no message can follow the turn
            self._count_branch("an earlier turn was truncated and cannot be continued", str(error))
            return chat.begin(messages, tools, variables)
        if isinstance(conversation, NewBranch):
            self._count_branch(
                "the messages cannot be appended to the earlier turn", conversation.reason
            )
            return conversation.conversation
        return conversation

    def _describe_mismatch(
        self,
        message_keys: tuple[str, ...],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return how a chat request differs from the earlier turn that is most similar to it.

        The result is empty if all earlier turns are text completions.
        """
        turns = [turn for turn in self.turns if turn.conversation is not None]
        if not turns:
            return ""

        def count_equal_messages(turn: AgentTurn) -> int:
            pairs = zip(turn.message_keys, message_keys, strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        # the latest of the most similar turns
        turn = max(reversed(turns), key=count_equal_messages)
        assert turn.conversation is not None
        index = count_equal_messages(turn)
        if index < min(len(turn.message_keys), len(message_keys)):
            return describe_difference(index, turn.message_keys[index], message_keys[index])
        if turn.conversation.tools != tools:
            return "the tools differ"
        if turn.conversation.variables != variables:
            return "chat_template_kwargs differ"
        # without new messages after it, an answer cannot be continued
        return "the messages are the beginning of an earlier conversation"

    def _count_branch(self, reason: str, detail: str = "") -> None:
        """Count a request that starts a new branch, and log the first one with each reason."""
        self.branch_counts[reason] += 1
        if reason not in self.context.logged_messages:
            self.context.logged_messages.add(reason)
            _log.info(
                "episode %s starts a new branch: %s%s (later branches with this reason are not"
                " logged)",
                self.name,
                reason,
                f" ({detail})" * bool(detail),
            )

    def _answer_overflow(self, request: ModelRequest, length: int) -> list[Answer]:
        """Return empty answers to a prompt of `length` tokens, which leaves no room for a token.

        Raises RequestError if the episode has no turns yet.
        """
        if not self.turns:
            raise build_length_error(request, length, self.context.max_sequence_length)
        self.is_truncated = True
        return [Answer("", "length", length)] * request.n

    def _start_completion(
        self, prompt: _PreparedPrompt, max_tokens: int, stop: tuple[str, ...]
    ) -> PendingCompletion:
        """Start to generate a completion of at most `max_tokens` tokens."""
        input_tokens = prompt.tokens
        # repeated requests of the same input get different random numbers
        input_bytes = input_tokens.numpy().tobytes()
        repeats = self._request_counts[input_bytes]
        task = asyncio.create_task(
            self.generate(input_tokens, max_tokens, stop, prompt.grammar, repeats)
        )
        pending = PendingCompletion(input_tokens, repeats, task)
        self._request_counts[input_bytes] += 1
        self._tasks_in_flight.add(task)
        task.add_done_callback(self._tasks_in_flight.discard)
        return pending

    def _record_turn(
        self, request: ModelRequest, conversation: Conversation | None, pending: PendingCompletion
    ) -> Answer:
        """Record a completion as a turn, and return it as the answer for the agent."""
        response = pending.task.result()
        input_tokens = pending.input_tokens

        if conversation is not None:
            # parallel answers to one conversation must not have calls with equal ids
            conversation = with_call_id_key(
                conversation, input_tokens, response.tokens, pending.repeats
            )

        answer = self._answer_builder.build(
            request,
            conversation,
            input_tokens,
            response.tokens,
            self._answer_builder.build_tokens(response.tokens, response.logprobs),
            is_truncated=response.finish_reason == "length",
        )
        full_text = ""
        # nothing can follow an end-of-sequence token
        if (
            isinstance(request, TextRequest)
            and isinstance(request.prompt, str)
            and not bool(self.context.tokenizer.is_eos(response.tokens[-1:]))
        ):
            full_text = request.prompt + self._answer_builder.decode_after(
                input_tokens, response.tokens
            )
        message_keys: tuple[str, ...] = ()
        if isinstance(request, ChatRequest):
            assert conversation is not None
            content = conversation.turn_start + (answer.message["content"] or "")
            message = {**answer.message, "content": content}
            message_keys = self._build_message_keys([*request.context_messages, message])
        self.turns.append(AgentTurn(input_tokens, response, conversation, message_keys, full_text))
        return answer

    def _build_message_keys(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the comparison keys of chat messages, for `AgentTurn.message_keys`."""
        rules = self.context.settings.matching
        # a framework may replace ids that the model does not read
        compares_ids = self.context.get_chat().renders_call_ids
        return tuple(
            build_comparison_key(message, rules, compares_ids=compares_ids) for message in messages
        )


def _find_distribution_problem(request: ModelRequest) -> str | None:
    """Return which parameter of a request would change the distribution of turns; None if none."""
    if request.min_tokens:
        return f"min_tokens={request.min_tokens}: must be 0; set rollout.min_response_tokens"
    if request.stop_token_ids:
        return "stop_token_ids: must be empty; use stop"
    if request.ignore_eos:
        return "ignore_eos: must be false"
    return None


_ROOT = "/episodes/{episode}"
"""Path of a session."""


class AgentServer(ModelServer):
    """Server that serves the open sessions under `/episodes/NAME/v1`.

    A request without the API key of an open session gets the status 401.
    """

    def __init__(self, host: str, max_characters: int) -> None:
        """Create a server that is not listening yet.

        Args:
            host: Name or address of this machine that agents can connect to.
            max_characters: Maximum number of characters of a request body.
        """
        self._sessions: dict[str, AgentSession] = {}
        super().__init__(
            host,
            0,
            max_characters,
            "environment.endpoint_host",
            self._find_session,
            root=_ROOT,
            other_routes=[
                Route(f"{_ROOT}/attempts", self._start_attempt, methods=["POST"]),
                Route(f"{_ROOT}/v1/reward", self._add_reward, methods=["POST"]),
                Route(f"{_ROOT}/v1/metrics", self._set_metrics, methods=["POST"]),
            ],
            get_headers=self._get_identity_headers,
        )

    def get_session_url(self, session: AgentSession) -> str:
        """Return the URL of a session; with `/v1` appended it is the agent's `base_url`."""
        return f"{self.url}/episodes/{session.name}"

    def open_session(self, session: AgentSession) -> None:
        """Start to serve a session."""
        self.run_on_loop(self._add_session(session))

    def close_session(self, session: AgentSession) -> None:
        """Stop serving a session, which gets no further turns after this method has returned.

        May be called repeatedly.
        """
        self.run_on_loop(self._remove_session(session))

    async def _add_session(self, session: AgentSession) -> None:
        """Register a session; runs on the server's loop, like all other accesses to sessions."""
        self._sessions[session.name] = session

    async def _remove_session(self, session: AgentSession) -> None:
        """Remove a session, and cancel its completions in flight."""
        self._sessions.pop(session.name, None)
        session.close()

    def _find_session(self, request: Request) -> AgentSession:
        """Return the session of a request. Raises RequestError without the agent's API key."""
        session = self._sessions.get(request.path_params["episode"])
        if session is None or not has_key(request, session.agent_key):
            raise _build_key_error()
        return session

    async def _start_attempt(self, request: Request) -> Response:
        """Start an attempt of the agent, and return its API key."""
        session = self._sessions.get(request.path_params["episode"])
        # only the worker process, never the agent itself, may start an attempt
        if session is None or not has_key(request, session.worker_key):
            raise _build_key_error()
        return JSONResponse({"api_key": session.start_attempt()})

    async def _add_reward(self, request: Request) -> Response:
        """Add a reward to the episode or to a turn, and return the sum of all rewards."""
        session, content = await self._read_session_body(request)
        session.credit.add_reward(parse_body(RewardBody, content))
        return JSONResponse({"reward": session.credit.total_reward})

    async def _set_metrics(self, request: Request) -> Response:
        """Set metrics of the episode, and return all of its metrics."""
        session, content = await self._read_session_body(request)
        session.credit.set_metrics(parse_body(MetricsBody, content))
        return JSONResponse({"metrics": session.credit.metrics})

    async def _read_session_body(self, request: Request) -> tuple[AgentSession, bytes]:
        """Return the session of a request, and the body of the request. Raises RequestError."""
        self._find_session(request)
        content = await self.read_body(request)
        # another attempt may have started while the body arrived
        return self._find_session(request), content

    def _get_identity_headers(self, request: Request) -> Mapping[str, str]:
        """Return the headers that tell an agent its seed, prompt and sample index; none for a
        request without the agent's API key."""
        _, _, path = request.url.path.partition("/episodes/")
        session = self._sessions.get(path.partition("/")[0])
        if session is None or not has_key(request, session.agent_key):
            return {}
        return session.identity.build_headers()


def _normalize(request: ModelRequest) -> ModelRequest:
    """Return a request without the fields that do not change its answers in training."""
    return replace(
        request,
        id="",
        model="",
        sampling=SamplingParameters(),
        logprobs=False,
        stream=False,
        include_usage=False,
        ignored_fields=(),
    )


def _build_key_error() -> RequestError:
    """Return the error of a request without the API key of an open session."""
    return RequestError(401, "no episode in flight has this URL and API key", "invalid_api_key")
