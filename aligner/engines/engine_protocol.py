"""The generation interface: `await engine.generate(tokens, sampling, key=...)` for every engine.

`GenerationEngine` is the base class of the embedded, vLLM and TensorRT-LLM engines. Single
responses, episodes of environments, agents, evaluation, `aligner generate` and `aligner
serve-model` are coroutines that call `generate`; `aligner.engines.engine_loop` runs such coroutines
together with the steps of an engine.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from aligner.data.grammar_matcher import GrammarMatcher
from aligner.data.grammars import check_grammar
from aligner.data.stop_strings import StopSearch
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Grammar, Prompt, Sample
from aligner.errors import AlignerError, UnsupportedError
from aligner.models.pipeline_stages import has_outer_weights_on_all_stages
from aligner.models.shape import ModelShape
from aligner.resharding.verify import compute_checksums, find_different
from aligner.resharding.weight_update import ExpectedSlice, WeightFormat, WeightUpdate
from aligner.schema import EngineConfig, EngineParallelConfig

_log = logging.getLogger(__name__)

SpanListener = Callable[[str, float, float], None]
"""Called with the name of an engine's activity, its begin and its end in seconds of
`time.perf_counter`."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters of a request.

    Log-probs are those of the full distribution at `temperature`, except with `renormalize`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Number of most probable tokens to sample from; 0: all."""
    top_p: float = 1.0
    """Probability mass of the most probable tokens to sample from; 1: all."""
    min_p: float = 0.0
    """Minimum probability of a token at `temperature`, relative to the most probable token."""
    renormalize: bool = False
    """If top-k, top-p or min-p exclude tokens, compute log-probs over the sampling support, and
    return the support."""
    min_new_tokens: int = 0
    """Number of tokens before the first stop token is allowed."""
    greedy: bool = False
    """Select the most probable token."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these tokens, and includes it."""
    stop: tuple[str, ...] = ()
    """A response ends with the token that completes the first of these strings, and includes it.
    Strings that begin in the first `min_new_tokens` tokens are ignored."""
    routes: bool = False
    """Return the expert routing of every token; mixture-of-experts models only."""
    grammar: str | None = None
    """Grammar of the response in llguidance's dialect of Lark (guided decoding); None for free
    text. Log-probs are those of the distribution over the allowed tokens. Stop tokens are allowed
    if and only if the text is complete, and `min_new_tokens` has no effect."""

    def __post_init__(self) -> None:
        # All problems are reported at once, so that a user corrects them in one go.
        rules = (
            (self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: must be at least 1"),
            (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"min_new_tokens={self.min_new_tokens}: must be between 0 and"
                f" max_new_tokens={self.max_new_tokens}",
            ),
            (
                self.temperature > 0,
                f"temperature={self.temperature}: must be above 0; for the most probable"
                " token use greedy decoding",
            ),
            (
                isinstance(self.stop, tuple)
                and all(isinstance(string, str) and string for string in self.stop),
                f"stop={self.stop!r}: must contain strings of at least one character",
            ),
            (self.top_k >= 0, f"top_k={self.top_k}: must be at least 0; 0 disables top-k"),
            (0 < self.top_p <= 1, f"top_p={self.top_p}: must be above 0 and at most 1"),
            (
                0 <= self.min_p <= 1,
                f"min_p={self.min_p}: must be at least 0 and at most 1; 0 disables min-p",
            ),
        )
        problems = [message for is_valid, message in rules if not is_valid]
        if problems:
            raise AlignerError("\n".join(problems))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "SamplingOptions":
        """Return the options with these fields; JSON has lists instead of tuples."""
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**arguments)

    @property
    def has_truncation(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def returns_support(self) -> bool:
        """Whether completions contain the sampling support of each token."""
        return self.has_truncation and self.renormalize

    def is_batchable_with(self, other: "SamplingOptions") -> bool:
        """Return whether both differ at most in their token limits, stop strings and grammars, so
        that one batch can hold both."""
        # Limits and stop strings decide only when a response ends. A grammar has a mask per row.
        with_other_limits = replace(
            self,
            max_new_tokens=other.max_new_tokens,
            min_new_tokens=other.min_new_tokens,
            stop=other.stop,
            grammar=other.grammar,
        )
        return with_other_limits == other


@dataclass(frozen=True)
class GenerationRequest:
    """One sample to generate: a prompt, and the index of the sample among the prompt's samples."""

    prompt: Prompt
    sample_index: int
    max_new_tokens: int | None = None
    """Maximum number of response tokens of this sample, if lower than that of the options."""
    partial_sample: Sample | None = None
    """The unfinished sample (partial rollout) to continue."""

    def get_token_limit(self, options: SamplingOptions) -> int:
        """Return the maximum number of response tokens."""
        if self.max_new_tokens is None:
            return options.max_new_tokens
        return min(self.max_new_tokens, options.max_new_tokens)


@dataclass(frozen=True)
class RequestKey:
    """Identity of a call of `generate`. With the seed it determines the random stream.

    The stream belongs to a prompt's sample and begins at input token `stream_start`, so that a call
    that continues a response after an interruption uses the random numbers that would have come
    next. Calls of agents, and branches of episodes, also mix the digest of the first `stream_start`
    input tokens and `repeats` into the stream, because their order may differ between runs.
    """

    prompt_id: int
    sample_index: int
    stream_start: int
    """Number of input tokens before the random stream begins."""
    repeats: int | None = None
    """How often the episode has requested a completion of the same tokens before; None if the
    stream depends only on prompt, sample and position."""

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The sort key for requests that are known at the start of an engine step."""
        return self.prompt_id, self.sample_index, self.stream_start, self.repeats or 0


@dataclass(eq=False)
class EngineRequest:
    """A pending call of `generate` inside an engine."""

    tokens: Tensor
    """int64 [T]"""
    sampling: SamplingOptions
    key: RequestKey
    is_continued: bool = False
    """Whether a later request may begin with these tokens and the completion: its KV cache then
    stays resident as long as no other request needs the memory."""
    stop_search_start: int | None = None
    """Index of the first token of input and completion in which a stop string may begin; None: the
    first one after `sampling.min_new_tokens` generated tokens."""
    stop_search: StopSearch | None = None
    """Search for `sampling.stop` in the completion; None without stop strings. The engine sets
    it."""
    grammar_start: int | None = None
    """Index of the first token of input and completion that follows `sampling.grammar`; None: the
    first generated one."""
    grammar_matcher: GrammarMatcher | None = None
    """State of the completion in its grammar; None without a grammar. The replica's first rank sets
    it, because it samples for all ranks."""
    future: "Future[Completion]" = field(default_factory=Future)

    @property
    def total_tokens(self) -> int:
        """Maximum length of input and completion."""
        return len(self.tokens) + self.sampling.max_new_tokens

    def get_stream_entropy(self, seed: int) -> list[int]:
        """Return the integers that identify the request's random stream in a run with this seed."""
        key = self.key
        entropy = [seed, key.prompt_id, key.sample_index]
        if key.repeats is None:
            return entropy
        # The order of an agent's calls may differ between runs, so the stream depends on the tokens
        # of the input instead.
        context = self.tokens[: key.stream_start].numpy().astype(np.int64, copy=False)
        return [*entropy, xxhash.xxh3_128_intdigest(context.tobytes()), key.repeats]

    def find_stop_end(self, tokens: Sequence[int]) -> int | None:
        """Search the next tokens of the completion for stop strings; see `StopSearch.find_end`."""
        return None if self.stop_search is None else self.stop_search.find_end(tokens)

    @property
    def first_grammar_token(self) -> int:
        """Index of the first token of input and completion that follows the grammar."""
        return len(self.tokens) if self.grammar_start is None else self.grammar_start

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the completion follows; None if it follows none."""
        sampling = self.sampling
        if sampling.grammar is None:
            return None
        return Grammar(sampling.grammar, sampling.stop_token_ids)

    def resolve(self, completion: Completion) -> None:
        """Deliver the completion, unless the caller was cancelled."""
        if self.grammar_matcher is not None and self.grammar_matcher.dead_end:
            _log.warning(
                "prompt %s, sample %s: the response ended before its text was complete, because its"
                " grammar allowed no token: %s",
                self.key.prompt_id,
                self.key.sample_index,
                self.grammar_matcher.dead_end,
            )
        # `set_result` would raise InvalidStateError for a cancelled future.
        if not self.future.done():
            self.future.set_result(completion)

    def fail(self, error: Exception) -> None:
        """Deliver an error, unless the caller was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of given tokens, each given the tokens before it; S tokens."""

    logprobs: Tensor
    """Log-prob of each token, float32 [S] on the host."""
    top_ids: Tensor
    """The most probable tokens at each position, in descending order, int64 [S, K] on the host."""
    top_logprobs: Tensor
    """Log-probs of `top_ids`, float32 [S, K]."""


@dataclass(eq=False)
class ScoringRequest:
    """A pending call of `score` inside an engine."""

    tokens: Tensor
    """int64 [T]"""
    start: int
    """Index of the first token that is scored, at least 1."""
    top_logprobs: int
    """Number of most probable tokens to return at each position."""
    temperature: float
    """Temperature of the log-probs."""
    future: "Future[TokenScores]" = field(default_factory=Future)

    def resolve(self, scores: TokenScores) -> None:
        """Deliver the scores, unless the caller was cancelled."""
        if not self.future.done():
            self.future.set_result(scores)

    def fail(self, error: Exception) -> None:
        """Deliver an error, unless the caller was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True)
class GenerationCounts:
    """What one rank of an engine has counted during generation."""

    draft_tokens: int = 0
    """Number of draft tokens (`engine.speculation`), also of those after a rejected one."""
    accepted_tokens: int = 0
    """Number of draft tokens that were accepted."""
    preemptions: int = 0
    """Number of times that a response lost its blocks of the KV cache to another one."""


def find_request_problems(
    requests: Sequence[GenerationRequest], options: SamplingOptions, shape: ModelShape
) -> list[str]:
    """Return one message per invalid request, with the prompt's id; the samples of a prompt share
    their messages."""
    problems: list[str] = []
    for request in requests:
        problems += _find_problems(request, options, shape)
    if unknown := [token for token in options.stop_token_ids if not 0 <= token < shape.vocab_size]:
        problems.append(
            f"stop_token_ids={unknown}: must be in the vocabulary, [0, {shape.vocab_size})"
        )
    if options.routes and not shape.num_experts:
        problems.append(
            "routes=true: requires a mixture-of-experts model; this model has no experts"
        )
    # The samples of a prompt have equal messages; a dict removes the copies and keeps the order.
    return list(dict.fromkeys(problems))


def _find_problems(
    request: GenerationRequest, options: SamplingOptions, shape: ModelShape
) -> list[str]:
    """Return one message per problem of a request."""
    prompt = request.prompt
    tokens = prompt.tokens
    limit = request.get_token_limit(options)
    if not len(tokens):
        return [f"prompt {prompt.id} is empty; must have at least one token"]
    problems = []
    if request.sample_index < 0:
        problems.append(
            f"prompt {prompt.id}: sample_index={request.sample_index} must be at least 0"
        )
    if limit < max(1, options.min_new_tokens):
        problems.append(
            f"prompt {prompt.id}: max_new_tokens={limit} must be at least"
            f" {max(1, options.min_new_tokens)}"
        )
    # A complete response is no request: at least one token must be missing.
    if request.partial_sample is not None and len(request.partial_sample.response) >= limit:
        problems.append(
            f"prompt {prompt.id}: the partial response of sample {request.sample_index} has"
            f" {len(request.partial_sample.response)} tokens already, but max_new_tokens={limit}"
        )
    if len(tokens) + limit > shape.max_positions:
        problems.append(
            f"prompt {prompt.id} has {len(tokens)} tokens; with max_new_tokens={limit} the sequence"
            f" exceeds the model's {shape.max_positions} positions; shorten the prompt or the"
            " response"
        )
    low, high = (int(token) for token in tokens.aminmax())
    if low < 0 or high >= shape.vocab_size:
        problems.append(
            f"prompt {prompt.id} has token ids from {low} to {high}; must be in the vocabulary,"
            f" [0, {shape.vocab_size}); tokenize it with this model's tokenizer"
        )
    return problems


_VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of it."""


def compute_weight_format(
    settings: EngineConfig, device: torch.device | str, family: str | None = None
) -> WeightFormat:
    """Return the format in which an engine gets weights.

    Args:
        settings: Section `engine` of the configuration.
        device: Device of the engine's ranks.
        family: Model family; required for vLLM only.
    """
    layout = settings.parallel
    # TensorRT-LLM receives whole tensors on every GPU, and slices them itself.
    if settings.kind == "tensorrt_llm":
        return WeightFormat(
            EngineParallelConfig(tensor=1, data=layout.ranks),
            torch.bfloat16,
            settings.bucket_mib << 20,
        )

    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if torch.device(device).type == "cuda" else "fp32"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]

    # A bucket is counted in whole tensors, of which each worker receives only its slices.
    if settings.kind == "vllm":
        assert family is not None, "the weights of a pipeline stage depend on the family"
        return WeightFormat(
            layout,
            dtype,
            settings.bucket_mib * layout.tensor << 20,
            vocabulary_multiple=_VLLM_VOCABULARY_MULTIPLE,
            has_outer_weights_on_all_stages=has_outer_weights_on_all_stages(family),
        )
    # The embedded engine receives weights in memory that it has for all tensors at once.
    return WeightFormat(layout, dtype, None)


class GenerationEngine(ABC):
    """Base class of the engines; one object per engine rank.

    Rank 0 of a replica schedules: `generate`, `reserve`, `step`, `interrupt` and `release` are
    called there only, and the replica's other ranks execute the same steps in `follow`. Methods
    that concern weights and memory are collective over the replica's tensor-parallel ranks.
    """

    can_score = True
    """Whether `score` is supported. Otherwise, `engine.verify` compares the log-probs of tokens
    that the engine generates."""

    def __init__(
        self,
        shape: ModelShape,
        settings: EngineConfig,
        weight_format: WeightFormat,
        tokenizer_directory: Path | None = None,
    ) -> None:
        """
        Args:
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            weight_format: The format in which the engine receives new weights.
            tokenizer_directory: Directory with the model's tokenizer, which stop strings and
                grammars require; None: requests with either are refused.
        """
        self._shape = shape
        self._tokenizer_directory = tokenizer_directory
        self._settings = settings
        self.weight_format = weight_format
        """The format in which the engine receives new weights."""
        self._no_weights_reason = "no weight sync has completed yet"
        self._incoming_version: int | None = None
        """Version of the open update."""
        self._verified_version: int | None = None
        """Version of the weights that `find_wrong_weights` has checked last."""
        self._verified_slices: Mapping[str, ExpectedSlice] = {}
        """Checksums of the held weights at that check, by name."""
        self._is_asleep = False
        self._arrivals: list[EngineRequest] = []
        self._scoring_requests: list[ScoringRequest] = []
        """Queued calls of `score`, in the order of their arrival."""
        self._arrivals_lock = threading.Lock()
        self.wake_up = threading.Event()
        """Set when a request arrives, or another event for which a thread may be waiting: the
        answer to a coroutine, or the completion of an external program."""

    async def generate(
        self,
        tokens: Tensor,
        sampling: SamplingOptions,
        *,
        key: RequestKey,
        is_continued: bool = False,
        stop_search_start: int | None = None,
        grammar_start: int | None = None,
    ) -> Completion:
        """Generate a completion of `tokens`.

        May be called from any thread and event loop. It does not run the engine's steps; the
        caller of `step`, such as `EngineLoop`, does.

        Args:
            tokens: int64 [T], the input: the prompt, and everything that follows it so far.
            sampling: Sampling parameters. Requests in flight must agree in all but the token
                limits; others wait.
            key: Identity of the request, which determines its random stream.
            is_continued: Keep the KV cache resident for a later request that begins with these
                tokens and the completion, until `release`.
            stop_search_start: Index of the first token of input and completion in which a stop
                string may begin, if `tokens` end with a part of the response; None: the first
                token after `sampling.min_new_tokens` generated tokens.
            grammar_start: Index of the first token of input and completion that follows
                `sampling.grammar`, if `tokens` end with a part of the text; None: the first
                generated token.

        Raises:
            UnsupportedError: The engine does not support one of the sampling parameters.
            AlignerError: The request is invalid, or the engine failed.
        """
        request = self.submit(tokens, sampling, key, is_continued, stop_search_start, grammar_start)
        return await asyncio.wrap_future(request.future)

    def submit(
        self,
        tokens: Tensor,
        sampling: SamplingOptions,
        key: RequestKey,
        is_continued: bool = False,
        stop_search_start: int | None = None,
        grammar_start: int | None = None,
    ) -> EngineRequest:
        """Queue a request for the next step; `generate` awaits its future. Thread-safe."""
        request = EngineRequest(
            tokens, sampling, key, is_continued, stop_search_start, grammar_start=grammar_start
        )
        try:
            self.check_sampling(sampling)
            self._check_length(request)
            self._begin_stop_search(request)
            self._begin_grammar(request)
        except AlignerError as error:
            request.fail(error)
            return request
        # Callers run in any thread, and the engine takes the arrivals in the thread of its steps.
        with self._arrivals_lock:
            self._arrivals.append(request)
        self.wake_up.set()
        return request

    async def score(
        self, tokens: Tensor, *, start: int = 1, top_logprobs: int = 0, temperature: float = 1.0
    ) -> TokenScores:
        """Return the log-probs of `tokens`, without generating anything.

        Like `generate`, it may be called from any thread, and the caller of `step` runs the engine.
        A step scores the sequences in a forward pass of its own, which does not use the KV cache,
        so that requests in flight continue.

        Args:
            tokens: int64 [T].
            start: Index of the first token to score, from 1 to T. The first token of a sequence has
                no log-prob, because no token precedes it.
            top_logprobs: Number of most probable tokens to return at each position.
            temperature: Temperature of the log-probs.

        Returns:
            The scores of the tokens from `start` on.

        Raises:
            UnsupportedError: The engine does not compute log-probs of given tokens.
            AlignerError: The tokens are invalid, or the engine failed.
        """
        request = self.submit_scoring(tokens, start, top_logprobs, temperature)
        return await asyncio.wrap_future(request.future)

    def submit_scoring(
        self, tokens: Tensor, start: int = 1, top_logprobs: int = 0, temperature: float = 1.0
    ) -> ScoringRequest:
        """Queue tokens to be scored; `score` awaits the request's future. Thread-safe."""
        request = ScoringRequest(tokens, start, top_logprobs, temperature)
        try:
            self._check_scoring(request)
        except AlignerError as error:
            request.fail(error)
            return request
        with self._arrivals_lock:
            self._scoring_requests.append(request)
        self.wake_up.set()
        return request

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Version of the current weights.

        None before the first update, while the weights are overwritten, after that failed, and
        after a sleep that dropped them.
        """

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its replica."""
        return True

    def check(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> None:
        """Check samples before any of them is generated.

        Raises:
            UnsupportedError: The engine does not support one of the sampling parameters.
            AlignerError: The engine has no weights or sleeps; or some samples cannot be generated:
                the message names every one.
        """
        self.check_sampling(options)
        self._check_awake("generate")
        self._check_weights()
        if self.has_work:
            raise AlignerError(
                "the engine is already generating; finish or cancel the earlier generation first"
            )
        if problems := find_request_problems(requests, options, self._shape):
            raise AlignerError("\n".join(problems))

    def check_sampling(self, sampling: SamplingOptions) -> None:
        """Check sampling parameters as `submit` does. Thread-safe.

        A server calls it to refuse a request before the request has any effect.

        Raises:
            UnsupportedError: The engine does not support one of the parameters.
            AlignerError: No response can follow the grammar.
        """
        if problem := self._find_unsupported(sampling):
            raise UnsupportedError(problem)
        if sampling.grammar is not None:
            grammar = Grammar(sampling.grammar, sampling.stop_token_ids)
            check_grammar(self._tokenizer.grammar_vocabulary, grammar)

    def reserve(self, sequences: int, tokens: int) -> None:  # noqa: B027  (optional)
        """Prepare the KV cache for `sequences` sequences of at most `tokens` tokens.

        A caller that knows its requests in advance calls it before the first one, while the engine
        has no work. Raises AlignerError if the memory does not suffice.
        """

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a request is queued or in flight."""

    @abstractmethod
    def step(self) -> None:
        """Run one engine step, and deliver the completions that it finishes.

        Requests that are known at the start of the step are admitted in the order of their keys.
        Raises AlignerError if the engine has no weights or sleeps, or if the step fails.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Deliver all requests in flight as they are, with the finish reason `interrupted`."""

    @abstractmethod
    def release(self, prompt_id: int, sample_index: int) -> None:
        """Free the KV cache that is resident for later requests of a sample: its episode has
        ended."""

    def follow(self) -> None:  # noqa: B027  (engines whose other ranks have no steps)
        """Execute the commands of the replica's rank 0 until it calls `end_turn`.

        The other ranks of the replica call this method. Raises AlignerError if a command raised it
        on rank 0.
        """

    def end_turn(self, message: Any = None) -> Any:
        """Return rank 0's JSON `message` on every rank of the replica. Collective.

        On rank 0 this call also makes the other ranks return from `follow`.
        """
        return message

    def take_counts(self) -> GenerationCounts:
        """Return the counts since the last call."""
        return GenerationCounts()

    @abstractmethod
    def begin_update(self, version: int) -> WeightUpdate:
        """Open an update to new weights, which serve from its `commit` on.

        Until then, and after an `abort`, the engine keeps its version if it holds both; an engine
        that overwrites its weights has none from the first tensor on until the commit. Requests in
        flight finish on the old weights or continue on the new ones, as `engine.in_flight` says.
        Raises AlignerError if another update is open or the engine sleeps.
        """

    def held_weights(self) -> Mapping[str, Tensor]:
        """Return this rank's slices of the weights by Hugging Face name: the parameters that the
        engine computes with, or views of them, never copies.

        `engine.verify` compares them with the trainer's weights. An engine that cannot return them
        overrides `find_wrong_weights` and `find_changed_weights` instead.

        `build_engine` refuses an engine class without one of the two.
        """
        raise NotImplementedError

    @property
    def shared_names(self) -> Container[str]:
        """Names of the weights whose memory belongs to the trainer, which changes them."""
        return ()

    def find_wrong_weights(self, expected: Mapping[str, ExpectedSlice]) -> Sequence[str]:
        """Compare the held weights with the trainer's; see `HeldWeights.find_wrong_weights`."""
        checksums = compute_checksums(self.held_weights(), expected, self.weight_format.dtype)
        self._verified_version = self.version
        self._verified_slices = {
            name: replace(expected[name], checksum=checksum) for name, checksum in checksums.items()
        }
        return [name for name, each in expected.items() if checksums.get(name) != each.checksum]

    def find_changed_weights(self) -> Sequence[str]:
        """Compare the held weights with their last verification; see
        `HeldWeights.find_changed_weights`."""
        # The engine has no weights after a sleep or a failed update.
        if self.version is None or self.version != self._verified_version:
            return ()
        shared_names = self.shared_names
        own_slices = {
            name: each for name, each in self._verified_slices.items() if name not in shared_names
        }
        return find_different(self.held_weights(), own_slices, self.weight_format.dtype)

    def discard_weights(self, reason: str) -> None:  # noqa: B027  (optional)
        """Refuse to generate with the current weights; see `HeldWeights.discard_weights`.

        By default the method does nothing: the failed weight sync ends the run.
        """

    @property
    def can_restart(self) -> bool:
        """Whether `restart` works after this engine has raised `EngineExited`."""
        return False

    def restart(self) -> None:
        """Drop all requests and the weights, and start the engine's processes again in the
        background.

        Every rank of the replica calls this method after `EngineExited`. The next weight update
        waits until the processes have started, and raises the error if they have not. Raises
        EngineExited if they have exited too often.
        """
        raise NotImplementedError

    @abstractmethod
    def sleep(self) -> None:
        """Free the device memory of the KV cache and of the weights, which are dropped.

        Raises AlignerError while requests are in flight. A second call has no effect.
        """

    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory again. The weights have to be synced again."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the processes that the engine started, if any. The engine is not used again."""

    def _find_unsupported(self, sampling: SamplingOptions) -> str | None:
        """Return which parameter this engine does not support; None if it supports all."""
        return None

    def _check_length(self, request: EngineRequest) -> None:
        """Raise AlignerError if input and completion together may be too long for the model."""
        length = request.total_tokens
        if length > self._shape.max_positions:
            raise AlignerError(
                f"prompt {request.key.prompt_id}: input and completion have up to {length} tokens,"
                f" but the model has {self._shape.max_positions} positions"
            )

    def _check_scoring(self, request: ScoringRequest) -> None:
        """Raise AlignerError if this engine cannot score a sequence."""
        length = len(request.tokens)
        if not 1 <= request.start <= length:
            raise AlignerError(
                f"start={request.start}: must be from 1 to the number of tokens, {length}"
            )
        if length > self._shape.max_positions:
            raise AlignerError(
                f"{length} tokens exceed the {self._shape.max_positions} positions of the model"
            )
        low, high = (int(token) for token in request.tokens.aminmax())
        if low < 0 or high >= self._shape.vocab_size:
            raise AlignerError(
                f"token ids from {low} to {high}; must be in the vocabulary,"
                f" [0, {self._shape.vocab_size})"
            )

    def _begin_stop_search(self, request: EngineRequest) -> None:
        """Set `EngineRequest.stop_search`.

        Raises AlignerError if there are stop strings, and the model has no tokenizer.
        """
        sampling = request.sampling
        if not sampling.stop:
            return
        search_start = request.stop_search_start
        if search_start is None:
            search_start = len(request.tokens) + sampling.min_new_tokens
        request.stop_search = StopSearch(
            self._tokenizer, sampling.stop, request.tokens.tolist(), search_start
        )

    def _begin_grammar(self, request: EngineRequest) -> None:
        """Set `EngineRequest.grammar_matcher`, advanced through the tokens of the input that follow
        the grammar, which `check_sampling` has accepted."""
        grammar = request.grammar
        if grammar is None:
            return
        vocabulary = self._tokenizer.grammar_vocabulary
        request.grammar_matcher = vocabulary.start(grammar.text, grammar.stop_token_ids)
        request.grammar_matcher.accept(request.tokens[request.first_grammar_token :].tolist())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which is read when the first request needs it."""
        if self._tokenizer_directory is None:
            raise AlignerError("stop strings and grammars require the model's tokenizer")
        return Tokenizer(self._tokenizer_directory)

    def _take_arrivals(self) -> list[EngineRequest]:
        """Return the requests that arrived since the last call, in the order of their keys."""
        with self._arrivals_lock:
            arrivals = self._arrivals
            self._arrivals = []
        # By key, so that a batch does not depend on the order in which threads submitted requests.
        return sorted(arrivals, key=lambda request: request.key.order)

    def _check_weights(self) -> None:
        if self.version is None:
            raise AlignerError(f"the engine has no weights: {self._no_weights_reason}")

    def _fail_without_weights(self, requests: Sequence[ScoringRequest]) -> bool:
        """Fail scoring requests if the engine has no weights; return whether it has none."""
        try:
            self._check_weights()
        except AlignerError as error:
            for request in requests:
                request.fail(error)
            return True
        return False

    def _check_awake(self, action: str) -> None:
        if self._is_asleep:
            raise AlignerError(f"the engine is asleep and cannot {action}; wake the engine first")

    def _check_can_update(self, version: int) -> None:
        self._check_awake("update its weights")
        if self._incoming_version is not None:
            raise AlignerError(
                f"the weight update to version {version} cannot start: the update to version"
                f" {self._incoming_version} is still open"
            )

    def _check_can_sleep(self) -> None:
        if self._incoming_version is not None:
            raise AlignerError(
                "the engine cannot sleep: the weight update to version"
                f" {self._incoming_version} is open; commit or abort it first"
            )
        if self.has_work:
            raise AlignerError(
                "the engine cannot sleep: finish or cancel the responses in flight first"
            )
