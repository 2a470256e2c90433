"""Implementation of `aligner serve-model`: a stored model as the back end of the model server."""

import asyncio
import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from aligner.agents.answers import (
    AnswerBuilder,
    begin_conversation,
    build_length_error,
    check_prompt_tokens,
    prepare,
)
from aligner.agents.generate import build_source_tokenizer, load_weights, read_generating_shape
from aligner.agents.message_matching import to_template_messages
from aligner.agents.protocols.requests import (
    Answer,
    AnswerToken,
    ChatRequest,
    ModelRequest,
    RequestError,
    SamplingParameters,
    TextRequest,
    build_refusal,
)
from aligner.agents.protocols.response_store import ResponseStore
from aligner.agents.request_sampling import build_sampling_options, check_sampling
from aligner.agents.response_grammars import build_request_grammar
from aligner.data.chat_turns import ChatTurns, Conversation
from aligner.data.export import Source
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import RequestKey, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, EngineConfig

# maximum number of tokens of an answer if its request sets no limit
_DEFAULT_MAX_TOKENS = 512
# maximum number of characters of a request body per position of the model; a request for text
# completions may contain many prompts
_CHARACTERS_PER_TOKEN = 256
# number of different seeds of requests
_SEED_COUNT = 1 << 31


@dataclass(frozen=True, eq=False)
class _Prompt:
    """The input of a request."""

    tokens: Tensor
    """Input tokens, int64 [T]."""
    conversation: Conversation | None
    """The rendered chat; None for text, and for a chat without a chat template."""
    text: str = ""
    """The text of a prompt that is not a chat."""


class ServedModel:
    """A stored model that answers requests with their own sampling parameters.

    Requests with the same sampling parameters share the engine's batches. The model's chat template
    renders the messages; a model without one reads their texts, separated by blank lines.

    `answer` runs in the thread of the server, and `run_engine` in another one.
    """

    name = ""

    def __init__(
        self, source: Source, settings: EngineConfig, *, run: Config | None = None
    ) -> None:
        """Load the model into an engine.

        Args:
            source: The stored model.
            settings: The section `engine` of the configuration.
            run: Configuration of the run that trained the model; its settings of the chat template
                are used. None for another model.

        Raises:
            ConfigError: The model generates no text or has no tokenizer.
        """
        shape = read_generating_shape(source)
        self._tokenizer = build_source_tokenizer(source, run)
        self._max_positions = shape.max_positions
        self.model_name = source.directory.name
        """Name of the model in the list of models."""
        self.max_characters = _CHARACTERS_PER_TOKEN * shape.max_positions
        """Maximum number of characters of a request body."""
        self.stored_responses = ResponseStore()
        """Responses that requests of the Responses API may continue."""
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
        self._answer_builder = AnswerBuilder(self._tokenizer, lambda: self._chat_with_tools)
        self._engine = EmbeddedEngine(
            shape,
            settings,
            0,
            seed=1,
            device="cuda" if torch.cuda.is_available() else "cpu",
            tokenizer_directory=source.companions,
        )
        load_weights(self._engine, source)
        self._ids = itertools.count()

    def run_engine(self) -> None:
        """Run the engine's steps until the process is interrupted."""
        while True:
            self._engine.wake_up.wait()
            # Clear the event before checking for work, so that a request that arrives during the
            # check sets it again.
            self._engine.wake_up.clear()
            while self._engine.has_work:
                self._step()

    def _step(self) -> None:
        """Run one engine step; if it fails, its error fails all requests in flight."""
        try:
            self._engine.step()
        except AlignerError as error:
            self._engine.fail_all(error)

    async def answer(self, request: ModelRequest) -> list[Answer]:
        """Return the answers to a request; see `aligner.agents.model_server.Backend.answer`."""
        check_sampling(request, self._tokenizer.vocab_size)
        prepared_prompts = await prepare(request, lambda: self._prepare(request))
        tasks = [
            asyncio.create_task(self._generate_answer(request, prompt, options, index))
            for prompt, options in prepared_prompts
            for index in range(request.n)
        ]
        try:
            return await asyncio.gather(*tasks)
        except AlignerError as error:
            raise RequestError(500, str(error)) from error
        finally:
            # if one answer fails, cancel the tasks of the other answers
            for task in tasks:
                task.cancel()

    @cached_property
    def _chat_with_tools(self) -> ChatTurns:
        """The chat template with its format of tool calls.

        Created by the first request with tools, because the detection of the format logs a warning
        if the template does not support tools.
        """
        return ChatTurns.for_tokenizer(self._tokenizer)

    def mark_refused(self) -> None:
        """Do nothing: the client repeats the request, or reports the error."""

    def mark_unreceived(self, request: ModelRequest) -> None:
        """Do nothing: a repeated request is answered anew."""

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of input tokens of a chat. Raises RequestError."""
        (prompt,) = self._tokenize(request)
        return len(prompt.tokens)

    def _prepare(self, request: ModelRequest) -> list[tuple[_Prompt, SamplingOptions | None]]:
        """Return the inputs of a request, each with its sampling options.

        Raises RequestError if the request is invalid, before any answer is generated.
        """
        prompts = self._tokenize(request)
        return [(prompt, self._build_options(request, prompt)) for prompt in prompts]

    def _tokenize(self, request: ModelRequest) -> list[_Prompt]:
        """Return the inputs of a request: one for a chat, or one for each text.

        Raises RequestError if the request cannot be rendered or tokenized.
        """
        try:
            return self._tokenize_unchecked(request)
        except RequestError:
            raise
        except AlignerError as error:
            raise RequestError(400, str(error)) from error

    def _tokenize_unchecked(self, request: ModelRequest) -> list[_Prompt]:
        """Return the inputs of a request; see `_tokenize`.

        Raises AlignerError if the request cannot be rendered or tokenized.
        """
        if isinstance(request, TextRequest):
            return [self._tokenize_text(prompt) for prompt in request.prompts]
        assert isinstance(request, ChatRequest)
        return [self._tokenize_chat(request)]

    def _tokenize_text(self, prompt: str | tuple[int, ...]) -> _Prompt:
        """Return the input of a text or its token ids; see `_tokenize`."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(400, "prompt: must not be empty", param="prompt")
            return _Prompt(self._tokenizer.encode(prompt, add_bos=True), None, prompt)
        tokens = check_prompt_tokens(prompt, self._tokenizer.vocab_size)
        return _Prompt(tokens, None, self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _tokenize_chat(self, request: ChatRequest) -> _Prompt:
        """Return the input of a chat; see `_tokenize`."""
        if self._chat is not None:
            conversation = begin_conversation(request, self._chat)
            return _Prompt(conversation.tokens, conversation)
        if request.tools:
            raise RequestError(
                400,
                "tools: are not supported, because the model has no chat template",
                "unsupported",
                "tools",
            )
        messages = to_template_messages(request.messages)
        text = "\n\n".join(message["content"] for message in messages)
        return _Prompt(self._tokenizer.encode(text, add_bos=True), None)

    def _build_options(self, request: ModelRequest, prompt: _Prompt) -> SamplingOptions | None:
        """Return the sampling options of a request for one of its prompts; None if no token has to
        be generated.

        Raises RequestError if they are invalid, or if the prompt leaves no room for a token.
        """
        available_tokens = self._max_positions - len(prompt.tokens)
        has_room = available_tokens >= (0 if request.max_tokens == 0 else 1)
        if not has_room:
            raise build_length_error(request, len(prompt.tokens), self._max_positions)
        if request.max_tokens == 0:
            return None
        max_tokens = min(request.max_tokens or _DEFAULT_MAX_TOKENS, available_tokens)
        defaults = SamplingOptions(max_tokens, stop_token_ids=self._stop_token_ids)
        try:
            grammar = self._build_grammar(request, prompt)
            options = build_sampling_options(request, defaults, max_tokens, grammar)
            self._engine.check_sampling(options)
        except AlignerError as error:
            raise build_refusal(error) from error
        return options

    def _build_grammar(self, request: ModelRequest, prompt: _Prompt) -> str | None:
        """Return the grammar that a request requires of its answers; None if it requires none."""
        text = None if prompt.conversation is None else prompt.conversation.text
        return build_request_grammar(request, text, self._tokenizer, lambda: self._chat_with_tools)

    async def _generate_answer(
        self, request: ModelRequest, prompt: _Prompt, options: SamplingOptions | None, index: int
    ) -> Answer:
        """Generate the answer to a prompt with this index, and the log-probs that it contains."""
        if options is None:
            answer = Answer("", "length", len(prompt.tokens))
            return await self._add_scores(request, prompt, answer, prompt.tokens[:0])
        input_length = len(prompt.tokens)
        key = RequestKey(next(self._ids), 0, input_length)
        if request.sampling.seed is not None:
            # `repeats` separates the random streams from those of requests without a seed
            key = RequestKey(request.sampling.seed % _SEED_COUNT, index, input_length, repeats=0)
        completion = await self._engine.generate(prompt.tokens, options, key=key)
        conversation = prompt.conversation
        if conversation is not None:
            # the ids of tool calls must differ between the answers
            conversation = replace(conversation, call_id_key=f"{request.id} {index}")
        answer = self._answer_builder.build(
            request,
            conversation,
            prompt.tokens,
            completion.tokens,
            self._answer_builder.build_tokens(completion.tokens, completion.logprobs),
            is_truncated=completion.finish_reason == "length",
        )
        return await self._add_scores(request, prompt, answer, completion.tokens)

    async def _add_scores(
        self, request: ModelRequest, prompt: _Prompt, answer: Answer, generated_tokens: Tensor
    ) -> Answer:
        """Return an answer with the echoed prompt, and with the log-probs of the prompt and of
        alternatives, as far as the request asks for them.

        Args:
            request: The request.
            prompt: The prompt of the answer.
            answer: The answer without them.
            generated_tokens: The tokens of the answer, int64 [R].
        """
        should_echo = isinstance(request, TextRequest) and request.echo
        answer_tokens = [*answer.tokens]
        if should_echo:
            texts = map(self._tokenizer.decode_token, prompt.tokens.tolist())
            answer_tokens = [*(AnswerToken(text, None) for text in texts), *answer_tokens]
        if request.top_logprobs or (should_echo and request.logprobs):
            # Of an echoed prompt, all tokens but the first one have log-probs.
            start = 1 if should_echo else len(prompt.tokens)
            scores = await self._engine.score(
                torch.cat([prompt.tokens, generated_tokens]),
                start=start,
                top_logprobs=request.top_logprobs,
                temperature=_get_temperature(request.sampling) or 1.0,
            )
            first_scored = len(answer_tokens) - len(scores.logprobs)
            answer_tokens[first_scored:] = [
                AnswerToken(token.text, logprob, tuple(alternatives))
                for token, logprob, alternatives in zip(
                    answer_tokens[first_scored:],
                    scores.logprobs.tolist(),
                    map(self._answer_builder.build_tokens, scores.top_ids, scores.top_logprobs),
                    strict=True,
                )
            ]
        return replace(
            answer,
            text=prompt.text + answer.text if should_echo else answer.text,
            tokens=tuple(answer_tokens),
            echoed_tokens=len(prompt.tokens) if should_echo else 0,
        )


async def discard_reward(request: Request) -> Response:
    """Accept the reward of an agent without effect, so that agents written for training run
    unchanged: a stored model has no episodes that could be rewarded."""
    return JSONResponse({"reward": 0.0})


async def discard_metrics(request: Request) -> Response:
    """Accept the metrics of an agent without effect; see `discard_reward`."""
    return JSONResponse({"metrics": {}})


def _get_temperature(sampling: SamplingParameters) -> float:
    """Return the temperature of a request; 0 is greedy decoding."""
    return 1.0 if sampling.temperature is None else sampling.temperature
