"""A request in the embedded engine: its tokens, its blocks of the KV cache, and its random
numbers."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aligner.data.types import Completion, CompletionReason, SamplingSupport
from aligner.engines.embedded.sampling import generate_uniforms
from aligner.engines.embedded.speculation import PromptLookup
from aligner.engines.engine_protocol import EngineRequest

FULL_VOCABULARY = torch.empty(0, dtype=torch.int32)
"""The sampling support of a token that was sampled from the full vocabulary."""


@dataclass(eq=False)
class DecodedResponse:
    """A request in the embedded engine.

    `prompt` are the input tokens before the random stream begins, `tokens` everything after them:
    first the rest of the input, then the generated tokens.
    """

    request: EngineRequest
    prompt: tuple[int, ...]
    tokens: list[int]
    random_numbers: np.ndarray | None
    """float64 [limit]: uniform random numbers, entry t for `tokens[t]`; None for greedy decoding"""
    limit: int
    """Maximum number of `tokens`."""
    min_tokens: int
    """Number of `tokens` before the first stop token is allowed."""
    input_tokens: int
    """Number of `tokens` that belong to the input."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)
    """int32: sampling support of each generated token; empty if it was not requested."""
    finish_reason: CompletionReason | None = None
    expert_routing: list[Tensor] = field(default_factory=list)
    """[n, L, K] each: expert routing of consecutive tokens from the prompt's first on."""
    blocks: list[int] = field(default_factory=list)
    """Block table: blocks of the KV cache, in the order of the tokens; empty while it waits."""
    cached_tokens: int = 0
    """Number of tokens whose keys and values were in the blocks when the request was admitted."""
    state_row: int = -1
    """Row of the states of delta nets, while it has one."""
    prompt_lookup: PromptLookup | None = None
    """Source of draft tokens."""
    prefill_routing: Tensor | None = None
    """[n, L, K]: expert routing of the tokens that were prefilled, of the prompt at least."""

    @classmethod
    def from_request(cls, request: EngineRequest, seed: int) -> "DecodedResponse":
        """Return the state of a request before its first generated token."""
        tokens = request.tokens.tolist()
        # The input may contain tokens that an interrupted call has already generated. They count
        # as `tokens`, so that their random numbers are skipped.
        start = request.key.stream_start
        limit = request.total_tokens - start
        # A grammar itself decides when a stop token is allowed.
        min_new_tokens = request.sampling.min_new_tokens if request.grammar is None else 0
        random_numbers = None
        if not request.sampling.greedy:
            random_numbers = generate_uniforms(request.get_stream_entropy(seed), limit)
        return cls(
            request,
            prompt=tuple(tokens[:start]),
            tokens=tokens[start:],
            random_numbers=random_numbers,
            limit=limit,
            min_tokens=len(tokens) - start + min_new_tokens,
            input_tokens=len(tokens) - start,
        )

    @property
    def sample_key(self) -> tuple[int, int]:
        """Prompt id and sample index."""
        return self.request.key.prompt_id, self.request.key.sample_index

    @property
    def length(self) -> int:
        """Number of tokens of input and completion."""
        return len(self.prompt) + len(self.tokens)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of input and completion."""
        return len(self.prompt) + self.limit

    @property
    def was_preempted(self) -> bool:
        """Whether a waiting request has generated tokens, before it lost its blocks."""
        return bool(self.versions)

    @property
    def last_token(self) -> int:
        """Last generated token; the last prompt token if none was generated."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def is_new(self) -> bool:
        """Whether nothing follows the prompt yet."""
        return not self.tokens

    def build_completion(self) -> Completion:
        """Return the tokens generated so far, with their log-probs and versions."""
        support = None
        counts = [0 if ids is FULL_VOCABULARY else len(ids) for ids in self.supports]
        if any(counts):
            support = SamplingSupport.from_counts(torch.tensor(counts), torch.cat(self.supports))
        return Completion(
            tokens=torch.tensor(self.tokens[self.input_tokens :], dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            weight_versions=torch.tensor(self.versions, dtype=torch.int64),
            finish_reason=self.finish_reason or "interrupted",
            sampling_support=support,
            expert_routing=torch.cat(self.expert_routing) if self.expert_routing else None,
            grammar=self.request.grammar,
            grammar_start=self.request.first_grammar_token,
        )
