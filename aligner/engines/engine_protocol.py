"""What is asked of a generation engine: requests and how they are drawn, the weights it takes, and
the protocol."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aligner.data.types import Prompt, Sample
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.resharding.weight_update import WeightFormat, WeightUpdate
from aligner.schema import EngineConfig, EngineParallelConfig

SpanListener = Callable[[str, float, float], None]
"""Told what an engine did, by name, from when to when in seconds of `time.perf_counter`."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn. Log-probs are those of the whole distribution at `temperature`, but
    with `renormalize`."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Draw among the k most probable tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest most probable tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Draw among tokens whose probability at `temperature` is at least this share of the greatest
    one's."""
    renormalize: bool = False
    """Where tokens are left out, log-probs are those of the distribution over the others, and
    samples tell which these are."""
    min_new_tokens: int = 0
    """No stop token is drawn before so many tokens."""
    greedy: bool = False
    """Take the most probable token."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these, which it includes."""
    routes: bool = False
    """Tell the experts that were chosen for each token: of mixtures of experts alone, by an engine
    that can."""

    def __post_init__(self) -> None:
        wrong = [
            text
            for good, text in (
                (
                    self.max_new_tokens >= 1,
                    f"max_new_tokens={self.max_new_tokens}: must be at least 1",
                ),
                (
                    0 <= self.min_new_tokens <= self.max_new_tokens,
                    (
                        f"min_new_tokens={self.min_new_tokens}: must be between 0 and"
                        f" max_new_tokens={self.max_new_tokens}"
                    ),
                ),
                (
                    self.temperature > 0,
                    (
                        f"temperature={self.temperature}: must be above 0; for the most probable"
                        " token use greedy decoding"
                    ),
                ),
                (
                    self.top_k >= 0,
                    f"top_k={self.top_k}: must be at least 0; 0 disables top-k",
                ),
                (0 < self.top_p <= 1, f"top_p={self.top_p}: must be above 0 and at most 1"),
                (
                    0 <= self.min_p <= 1,
                    f"min_p={self.min_p}: must be at least 0 and at most 1; 0 disables min-p",
                ),
            )
            if not good
        ]
        if wrong:
            raise AlignerError("\n".join(wrong))

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out of what is drawn from."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def tells_kept(self) -> bool:
        """Whether samples tell what each token was drawn among."""
        return self.truncates and self.renormalize


@dataclass(frozen=True)
class GenerationRequest:
    """One response wanted: the prompt, and which of its samples this is."""

    prompt: Prompt
    sample_index: int
    max_new_tokens: int | None = None
    """A limit of this response's own, below the options'."""
    begun: Sample | None = None
    """This sample, unfinished: its response goes on, with the random numbers that would have come
    next."""
    turn_tokens: int | None = None
    """Most tokens of a turn of a response of several, which `TurnGeneration.go_on` tells what comes
    after each."""
    waits: bool = False
    """Whether the first turn waits for `go_on` too."""
    asked_before: int | None = None
    """For an agent's turns and for branches: how often the episode has asked for a response to the
    same tokens before, or so many that none has the same number. Their random numbers follow from
    the tokens that each turn reads, the first one's from this too, not from its place in the
    response. None: it is neither.
    """

    def limit(self, options: SamplingOptions) -> int:
        """Most tokens of the response."""
        most = options.max_new_tokens
        return most if self.max_new_tokens is None else min(self.max_new_tokens, most)


def request_problems(
    requests: Sequence[GenerationRequest], options: SamplingOptions, shape: ModelShape
) -> list[str]:
    """One line for each thing that is wrong, each naming its prompt; the samples of a prompt share
    their lines."""
    problems = [problem for request in requests for problem in _problems(request, options, shape)]
    if unknown := [token for token in options.stop_token_ids if not 0 <= token < shape.vocab_size]:
        problems.append(
            f"stop_token_ids={unknown}: must be in the vocabulary, [0, {shape.vocab_size})"
        )
    if options.routes and not shape.num_experts:
        problems.append(
            "routes=true: requires a mixture-of-experts model; this model has no experts"
        )
    return list(dict.fromkeys(problems))


def _problems(request: GenerationRequest, options: SamplingOptions, shape: ModelShape) -> list[str]:
    prompt, tokens, limit = request.prompt, request.prompt.tokens, request.limit(options)
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
    if request.begun is not None and len(request.begun.response) >= limit and not request.waits:
        problems.append(
            f"prompt {prompt.id}: the partial response of sample {request.sample_index} has"
            f" {len(request.begun.response)} tokens already, but max_new_tokens={limit}"
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


_VLLM_VOCABULARY = 64
"""vLLM pads the vocabulary to a multiple of it."""


def weight_format(settings: EngineConfig, device: torch.device | str) -> WeightFormat:
    """What the engine of these settings, on such devices, will say."""
    layout = settings.parallel
    # it takes whole tensors on every GPU, and cuts its share out of them
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
    # a bucket is of whole tensors, of which each worker takes its slices alone
    if settings.kind == "vllm":
        return WeightFormat(
            layout,
            dtype,
            settings.bucket_mib * layout.tensor << 20,
            vocabulary_multiple=_VLLM_VOCABULARY,
        )
    return WeightFormat(layout, dtype, None)


class Generation(Protocol):
    """Responses under way. Between two steps the weights may change."""

    @property
    def done(self) -> bool:
        """Whether every response is complete."""

    def step(self) -> list[tuple[int, Sample]]:
        """Go on; returns the responses that are complete now, each with its place among the
        requests.

        May return none. Raises AlignerError when the engine has no weights, or sleeps.
        """

    def unfinished(self) -> list[tuple[int, Sample]]:
        """The responses that are not complete as they are now, each with its place among the
        requests.

        Raises AlignerError where the engine cannot tell.
        """

    def cancel(self) -> None:
        """Drop what is not complete."""


class TurnGeneration(Generation, Protocol):
    """Responses of an engine's, which may be told to go on."""

    def go_on(self, place: int, tokens: Sequence[int]) -> None:
        """Have a complete response take a further turn, after tokens that it is given. It is of the
        request at that place.

        Raises AlignerError where no room is left for a token to be drawn.
        """

    def add(self, request: GenerationRequest) -> int:
        """Begin another response, at once; its place is the next number after those of the requests
        and of what was added.

        Raises AlignerError for one that needs more room than any of those that the generation was
        started with, and where the engine cannot.
        """

    def leave(self, place: int) -> None:
        """A complete response, of the request at that place, will not be told to go on."""


class BeginsGenerations(Protocol):
    """An engine, or what has one draw more than single responses."""

    def start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Generation:
        """As `GenerationEngine.start`."""


class BeginsTurns(Protocol):
    """An engine, or what passes on what it is asked."""

    @property
    def version(self) -> int | None:
        """As `GenerationEngine.version`."""

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> TurnGeneration:
        """As `GenerationEngine.start`."""


class DrawsEpisodes(BeginsGenerations, Protocol):
    """What has an engine draw episodes."""

    def forget(self, first: int) -> None:
        """Drop what was said in the episodes of prompts before the `first` of the stream. Raises
        OSError."""

    def take_waits(self) -> float | None:
        """Seconds that an episode waited for its environment, in the mean of those begun since the
        call before.

        None without any, and where it is not known.
        """

    def close(self) -> None:
        """End what answers the policy."""


def advance(generation: Generation, steps: int | None = None) -> dict[int, Sample]:
    """Take `steps`, or all that there are; the responses that they completed, by their places among
    the requests."""
    samples: dict[int, Sample] = {}
    for _ in itertools.count() if steps is None else range(steps):
        if generation.done:
            break
        samples |= generation.step()
    return samples


class GenerationEngine(ABC):
    """A generator of samples, one object per engine rank: what each offers, and refuses in the same
    words.

    Ownership: the caller decides which replica gets which requests; all tensor-parallel ranks of a
    replica make the same calls in the same order and return the same samples.
    """

    def __init__(
        self, shape: ModelShape, settings: EngineConfig, weight_format: WeightFormat
    ) -> None:
        self._shape, self._settings = shape, settings
        self.weight_format = weight_format
        """How it takes new weights."""
        self._why_no_weights = "no weight sync has completed yet"
        self._generation: Generation | None = None
        self._incoming: int | None = None
        """Version of the open update."""
        self._asleep = False

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Version of the weights that serve; None before the first update, while they are
        overwritten, after that failed, and after a sleep that dropped them."""

    @abstractmethod
    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> TurnGeneration:
        """Begin one sample per request. A sample depends on (seed, prompt id, sample index) and the
        weights alone.

        Raises AlignerError, before anything is generated, naming every request that can not be
        served; or while an earlier generation is neither done nor cancelled.
        """

    def take_guesses(self) -> tuple[int, int]:
        """Tokens that were guessed since the call before (`engine.speculation`), and how many of
        them were drawn."""
        return 0, 0

    @abstractmethod
    def begin_update(self, version: int) -> WeightUpdate:
        """Open an update to new weights; they serve, and stamp the tokens drawn, from its `commit`
        on.

        Until then, and after an `abort`, the engine keeps its version if it holds both; an engine
        that overwrites its weights has none from the first one on until a commit. Responses that it
        finds half-way are finished under the old weights, or go on under the new ones, as
        `engine.in_flight` says. Raises AlignerError when another update is open or the engine
        sleeps.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free the device memory of keys and values, and of the weights, which are dropped.

        Raises AlignerError while responses are under way. Sleeping twice is sleeping.
        """

    @abstractmethod
    def wake(self) -> None:
        """Take the memory back. The weights have to be published again."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes that the engine started, if any; it is not used again."""

    def _check_weights(self) -> None:
        if self.version is None:
            raise AlignerError(f"the engine has no weights: {self._why_no_weights}")

    def _check_awake(self, what: str) -> None:
        if self._asleep:
            raise AlignerError(f"the engine is asleep and cannot {what}; wake the engine first")

    def _check_may_start(self) -> None:
        self._check_awake("generate")
        self._check_weights()
        if self._generation is not None and not self._generation.done:
            raise AlignerError(
                "the engine is already generating; finish or cancel the earlier generation first"
            )

    def _check_may_update(self, version: int) -> None:
        self._check_awake("update its weights")
        if self._incoming is not None:
            raise AlignerError(
                f"the weight update to version {version} cannot start: the update to version"
                f" {self._incoming} is still open"
            )

    def _check_may_sleep(self) -> None:
        if self._incoming is not None:
            raise AlignerError(
                f"the engine cannot sleep: the weight update to version {self._incoming} is open;"
                " commit or abort it first"
            )
        if self._generation is not None and not self._generation.done:
            raise AlignerError(
                "the engine cannot sleep: finish or cancel the responses in flight first"
            )
