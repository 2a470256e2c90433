"""Implementation of `aligner serve-model`: a stored model as the back end of the model server."""

import asyncio
import itertools
import queue
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from aligner.agents.answers import AnswerBuilder, build_length_error, check_prompt_tokens
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
)
from aligner.data.chat_turns import ChatTurns, Conversation
from aligner.data.export import Source
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import RequestKey, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, EngineConfig

# maximum number of tokens of an answer if its request sets no limit
_DEFAULT_MAX_TOKENS = 512
# maximum number of characters of a request body per position of the model
_CHARACTERS_PER_TOKEN = 16
# number of different seeds of requests
_SEED_COUNT = 1 << 31
# Sampling parameters that the engine does not have, with their values that have no effect.
_UNSUPPORTED_PARAMETERS = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
}


@dataclass(frozen=True, eq=False)
class _Prompt:
    """The input of a request."""

    tokens: Tensor
    """Input tokens, int64 [T]."""
    conversation: Conversation | None
    """The rendered chat; None for text, and for a chat without a chat template."""


@dataclass(frozen=True, eq=False)
class _FirstTokenRequest:
    """A request for one token with its most probable alternatives."""

    request: ModelRequest
    prompt: _Prompt
    answer: "Future[Answer]" = field(default_factory=Future)
    """The answer, which the thread of the engine sets."""


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
        # the server's thread fills this queue, and the thread of `run_engine` empties it
        self._first_token_requests = queue.SimpleQueue[_FirstTokenRequest]()
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
            # only the thread of the engine may run the model
            while not self._first_token_requests.empty():
                self._answer_first_token(self._first_token_requests.get())

    def _step(self) -> None:
        """Run one engine step; if it fails, its error fails all requests in flight."""
        try:
            self._engine.step()
        except AlignerError as error:
            self._engine.fail_all(error)

    async def answer(self, request: ModelRequest) -> list[Answer]:
        """Return `request.n` answers; see `aligner.agents.model_server.Backend.answer`."""
        _check_sampling(request)
        try:
            prompt = self._tokenize(request)
        except RequestError:
            raise
        except AlignerError as error:
            raise RequestError(400, str(error)) from error
        available_tokens = self._max_positions - len(prompt.tokens)
        if available_tokens < 1:
            raise build_length_error(request, len(prompt.tokens), self._max_positions)

        max_tokens = min(request.max_tokens or _DEFAULT_MAX_TOKENS, available_tokens)
        options = self._build_options(request, max_tokens)
        tasks = [
            asyncio.create_task(
                self._request_first_token(request, prompt)
                if request.top_logprobs
                else self._generate_answer(request, prompt, options, index)
            )
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

    def _tokenize(self, request: ModelRequest) -> _Prompt:
        """Return the input of a request.

        Raises AlignerError if the request cannot be rendered or tokenized.
        """
        if isinstance(request, TextRequest):
            if isinstance(request.prompt, str):
                if not request.prompt:
                    raise RequestError(400, "prompt: must not be empty", param="prompt")
                return _Prompt(self._tokenizer.encode(request.prompt, add_bos=True), None)
            vocab_size = self._tokenizer.vocab_size
            return _Prompt(check_prompt_tokens(request.prompt, vocab_size), None)

        assert isinstance(request, ChatRequest)
        messages = to_template_messages(request.messages)
        if self._chat is not None:
            tools = [dict(tool) for tool in request.tools] or None
            conversation = self._chat.begin(messages, tools, request.chat_template_kwargs)
            return _Prompt(conversation.tokens, conversation)
        if request.tools:
            raise RequestError(
                400,
                "tools: are not supported, because the model has no chat template",
                "unsupported",
                "tools",
            )
        text = "\n\n".join(message["content"] for message in messages)
        return _Prompt(self._tokenizer.encode(text, add_bos=True), None)

    def _build_options(self, request: ModelRequest, max_tokens: int) -> SamplingOptions:
        """Return the sampling options of a request. Raises RequestError if they are invalid."""
        sampling = request.sampling
        vocab_size = self._tokenizer.vocab_size
        if not all(0 <= token < vocab_size for token in request.stop_token_ids):
            raise RequestError(
                400,
                f"stop_token_ids: each must be between 0 and {vocab_size - 1}",
                param="stop_token_ids",
            )
        stop_token_ids = () if request.ignore_eos else self._stop_token_ids
        try:
            return SamplingOptions(
                max_tokens,
                # greedy decoding reports log-probs at temperature 1
                temperature=_get_temperature(sampling) or 1.0,
                # -1 is vLLM's value for "all tokens"
                top_k=max(0, sampling.top_k or 0),
                top_p=1.0 if sampling.top_p is None else sampling.top_p,
                min_p=sampling.min_p or 0.0,
                min_new_tokens=request.min_tokens,
                greedy=_get_temperature(sampling) == 0,
                stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *request.stop_token_ids))),
                stop=request.stop,
            )
        except AlignerError as error:
            raise RequestError(400, str(error)) from error

    async def _generate_answer(
        self, request: ModelRequest, prompt: _Prompt, options: SamplingOptions, index: int
    ) -> Answer:
        """Generate the answer with this index."""
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
        return self._answer_builder.build(
            request,
            conversation,
            prompt.tokens,
            completion.tokens,
            self._answer_builder.build_tokens(completion.tokens, completion.logprobs),
            is_truncated=completion.finish_reason == "length",
        )

    async def _request_first_token(self, request: ModelRequest, prompt: _Prompt) -> Answer:
        """Return an answer of one token with alternatives; the engine's thread computes it."""
        first_token_request = _FirstTokenRequest(request, prompt)
        self._first_token_requests.put(first_token_request)
        self._engine.wake_up.set()
        return await asyncio.wrap_future(first_token_request.answer)

    def _answer_first_token(self, first_token_request: _FirstTokenRequest) -> None:
        """Compute one token and its most probable alternatives, and set the answer."""
        # the client may have disconnected while the request was in the queue
        if not first_token_request.answer.set_running_or_notify_cancel():
            return
        request = first_token_request.request
        prompt = first_token_request.prompt
        try:
            (logits,) = self._engine.next_logits([prompt.tokens])
        except AlignerError as error:
            first_token_request.answer.set_exception(error)
            return

        temperature = _get_temperature(request.sampling)
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        top_values, top_tokens = logprobs.topk(min(request.top_logprobs, len(logprobs)))
        # temperature 0 is greedy decoding
        token = top_tokens[:1] if temperature == 0 else logprobs.exp().multinomial(1)
        top_logprobs = tuple(self._answer_builder.build_tokens(top_tokens, top_values))
        (sampled_token,) = self._answer_builder.build_tokens(token, logprobs[token])
        answer_token = AnswerToken(sampled_token.text, sampled_token.logprob, top_logprobs)
        has_ended = bool(self._tokenizer.is_eos(token))
        first_token_request.answer.set_result(
            self._answer_builder.build(
                request,
                prompt.conversation,
                prompt.tokens,
                token,
                [answer_token],
                is_truncated=not has_ended,
            )
        )


def _check_sampling(request: ModelRequest) -> None:
    """Raise RequestError if a request has sampling parameters that the engine does not support."""
    sampling = request.sampling
    for name, neutral in _UNSUPPORTED_PARAMETERS.items():
        value = getattr(sampling, name)
        if value is not None and value != neutral:
            raise RequestError(
                400, f"{name}={value}: is not supported; must be {neutral}", "unsupported", name
            )
    # alternatives are computed from the logits of one token, without the engine's sampler
    if request.top_logprobs and (
        request.max_tokens != 1
        or sampling.top_p not in (None, 1)
        or sampling.top_k not in (None, 0, -1)
        or sampling.min_p
    ):
        raise RequestError(
            400,
            f"top_logprobs={request.top_logprobs}: is supported only with max_tokens=1 and without"
            " top_p, top_k and min_p",
            "unsupported",
            "top_logprobs",
        )


def _get_temperature(sampling: SamplingParameters) -> float:
    """Return the temperature of a request; 0 is greedy decoding."""
    return 1.0 if sampling.temperature is None else sampling.temperature
