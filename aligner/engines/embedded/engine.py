"""The embedded generation engine: a batched decoder in plain PyTorch that runs wherever the trainer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.config.model_shape import ModelShape
from aligner.config.schema import EngineParallel
from aligner.data.types import FinishReason, Sample
from aligner.engines.embedded.decoder import Cache, Decoder
from aligner.engines.embedded.sampling import choose, uniforms
from aligner.engines.embedded.weights import allocate, check_divisible, load_safetensors
from aligner.engines.protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError, ConfigError


@dataclass
class _Drawn:
    """A response so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"


class EmbeddedEngine:
    """A `GenerationEngine` for the Llama family.

    Distinct prompts are run once and shared by their samples; the batch is then decoded token by token, and shrinks
    when half of it has finished. A sample's random numbers depend on (seed, prompt id, sample index) alone; its logits
    depend on the batch it is in by the rounding of matrix products only.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: EngineParallel,
        rank: int,
        seed: int,
        batch_size: int,
        group: ProcessGroup | None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Rank `rank` of the engine's TP' x DP' ranks; the weights are not set yet.

        `batch_size` is the number of sequences decoded at a time; `group` holds the TP' ranks of this replica, in order
        (None when TP' is 1). Raises ConfigError when the model can not be cut so.
        """
        check_divisible(shape, layout.tensor)
        if layout.tensor > 1 and group is None:
            raise ConfigError(f"engine.parallel.tensor={layout.tensor} needs the process group of a replica's ranks, got None")
        if batch_size < 1:
            raise ConfigError(f"engine.batch_size={batch_size}: must be at least 1")
        self._shape, self._layout, self._rank, self._seed, self._batch_size = shape, layout, rank, seed, batch_size
        self._weights = allocate(shape, layout.tensor, torch.device(device), dtype)
        self._decoder = Decoder(shape, self._weights, layout.tensor, rank % layout.tensor, group)
        self._version: int | None = None

    def weight_views(self) -> Mapping[str, Tensor]:
        """This rank's slice of every weight by its Hugging Face name, as writable views of the engine's storage."""
        return self._weights.views

    def finish_update(self, version: int) -> None:
        """All weights of `version` have been written: stamp the tokens drawn from now on with it."""
        self._version = version

    def load_directory(self, path: Path) -> None:
        """Read this rank's slices of a Hugging Face directory of safetensors; they become version 0."""
        load_safetensors(path, self._shape, self._layout, self._rank, self._weights.views)
        self.finish_update(0)

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order; collective over the replica's tensor-parallel ranks.

        Raises AlignerError, before anything is generated, for a request that can not be served.
        """
        version = self._check(requests, options)
        # Sorted by length for little padding; the samples of one prompt stay together and share its prefill.
        order = sorted(range(len(requests)), key=lambda at: (len(requests[at].prompt.tokens), requests[at].prompt.id))
        drawn: dict[int, _Drawn] = {}
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            with torch.inference_mode():
                responses = self._generate_batch([requests[at] for at in chosen], options)
            drawn |= zip(chosen, responses, strict=True)
        return [_sample(request, drawn[at], version) for at, request in enumerate(requests)]

    def _check(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> int:
        """Version of the weights. Raises AlignerError for what can not be generated."""
        if self._version is None:
            raise AlignerError("the engine has no weights yet: publish into weight_views() and call finish_update first")
        if options.max_new_tokens < 1 or (options.temperature <= 0):
            raise AlignerError(
                f"max_new_tokens={options.max_new_tokens} must be at least 1, temperature={options.temperature} above 0"
            )
        for request in requests:
            tokens = request.prompt.tokens
            if not len(tokens):
                raise AlignerError(f"prompt {request.prompt.id} is empty; it needs at least one token")
            if len(tokens) + options.max_new_tokens > self._shape.max_positions:
                raise AlignerError(
                    f"prompt {request.prompt.id} has {len(tokens)} tokens; with max_new_tokens={options.max_new_tokens} that"
                    f" exceeds the model's {self._shape.max_positions} positions: shorten the prompt or the response"
                )
            low, high = tokens.aminmax()
            if low < 0 or high >= self._shape.vocab_size:
                raise AlignerError(
                    f"prompt {request.prompt.id} has token ids from {int(low)} to {int(high)}; the vocabulary is"
                    f" [0, {self._shape.vocab_size}): was it tokenized with this model's tokenizer?"
                )
        return self._version

    def _generate_batch(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[_Drawn]:
        limit = options.max_new_tokens
        numbers = None
        if not options.greedy:
            streams = [uniforms(self._seed, request.prompt.id, request.sample_index, limit) for request in requests]
            numbers = torch.from_numpy(np.stack(streams)).to(self._weights.embedding.device)
        logits, cache = self._prefill(requests, limit)
        drawn = [_Drawn() for _ in requests]
        rows = list(range(len(requests)))  # the request of each row of the cache
        for step in range(limit):
            tokens, logprobs = self._draw(logits, None if numbers is None else numbers[:, step], options)
            ended = _record(drawn, rows, tokens, logprobs, options)
            running = [row for row, over in enumerate(ended) if not over]
            if not running or step == limit - 1:
                break
            if 2 * len(running) <= len(rows):
                kept = torch.tensor(running, device=tokens.device)
                cache.select(kept)
                tokens = tokens[kept]
                numbers = None if numbers is None else numbers[kept]
                rows = [rows[row] for row in running]
            logits = self._decoder.decode(tokens, cache)
        return drawn

    def _prefill(self, requests: Sequence[GenerationRequest], limit: int) -> tuple[Tensor, Cache]:
        """Logits of each request's first response token, [B, V / TP], and the cache; each distinct prompt is run once."""
        place: dict[tuple[int, ...], int] = {}
        copies = [place.setdefault(tuple(request.prompt.tokens.tolist()), len(place)) for request in requests]
        lengths = [len(prompt) for prompt in place]
        padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in place]
        device = self._weights.embedding.device
        rows = torch.tensor(copies, device=device)
        tokens, sizes = torch.tensor(padded, device=device), torch.tensor(lengths, device=device)
        logits, cache = self._decoder.prefill(tokens, sizes, rows, max(lengths) + limit - 1)
        return logits[rows], cache

    def _draw(self, logits: Tensor, numbers: Tensor | None, options: SamplingOptions) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B] and log-probs float32 [B]: the first rank draws, so that all ranks agree to the last bit."""
        whole = self._decoder.gather_logits(logits)
        both = torch.empty(2, len(logits), dtype=torch.float64, device=logits.device)
        if whole is not None:
            both[0], both[1] = choose(whole, options.temperature, numbers)
        tokens, logprobs = self._decoder.broadcast(both)
        return tokens.long(), logprobs.float()


def _record(drawn: list[_Drawn], rows: list[int], tokens: Tensor, logprobs: Tensor, options: SamplingOptions) -> list[bool]:
    """Append a step's tokens to the responses that still run; says of each row whether it has ended."""
    ended = []
    for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
        response = drawn[row]
        if response.finish_reason != "stop":
            response.tokens.append(token)
            response.logprobs.append(logprob)
            if token in options.stop_token_ids:
                response.finish_reason = "stop"
        ended.append(response.finish_reason == "stop")
    return ended


def _sample(request: GenerationRequest, response: _Drawn, version: int) -> Sample:
    prompt = request.prompt.tokens.cpu()
    return Sample(
        prompt_id=request.prompt.id,
        sample_index=request.sample_index,
        tokens=torch.cat((prompt, torch.tensor(response.tokens))),
        prompt_length=len(prompt),
        engine_logprobs=torch.tensor(response.logprobs),
        weight_versions=torch.full((len(response.tokens),), version),
        finish_reason=response.finish_reason,
        metadata=request.prompt.metadata,
    )
