"""A response that an engine is drawing: what there is of it so far, and the sample that it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aligner.data.types import FinishReason, KeptTokens, Sample, create_empty_samples
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError

NO_IDS = torch.empty(0, dtype=torch.int32)
"""The ids of a token that was drawn among all, or not drawn."""


@dataclass(eq=False)
class PartialResponse:
    """A response so far."""

    request: GenerationRequest
    limit: int
    """Most tokens that it may have."""
    tokens: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    """Whether each token was; the others were given. Of the last ones that it does not speak of all
    were."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that drew each token."""
    kept: list[Tensor] = field(default_factory=list)
    """int32 ids that each token was drawn among, none where among all; empty where the engine does
    not tell."""
    finish_reason: FinishReason | None = None
    routes: list[Tensor] = field(default_factory=list)
    """Of the tokens from the prompt's first to the last but one, some [n, L, K] after others; empty
    where nobody asks."""
    _told: Sample | None = field(default=None, init=False)
    """What `sample` gave last; tokens are only ever added."""

    @property
    def turn_limit(self) -> int:
        """Most tokens that the response may have when its turn ends."""
        turn = self.request.turn_tokens
        return self.limit if turn is None else min(self.limit, len(self.drawn) + turn)

    def take_begun(self, options: SamplingOptions) -> None:
        """Go on from what the request has begun, if anything."""
        begun = self.request.begun
        if begun is None:
            return
        self.tokens = begun.response.tolist()
        drawn = (
            torch.ones(len(self.tokens), dtype=torch.bool) if begun.drawn is None else begun.drawn
        )
        # The turn that it is in begins behind what was given last, or behind the end of the turn
        # before it.
        ends = ~drawn | torch.isin(
            begun.response, torch.tensor(options.stop_token_ids, dtype=torch.int64)
        )
        before = ends.nonzero()[-1:, 0].tolist()
        self.drawn = drawn[: before[0] + 1].tolist() if before else []
        self.logprobs = begun.engine_logprobs.tolist()
        self.versions = begun.weight_versions.tolist()
        if options.tells_kept or begun.kept is not None:
            self.kept = (begun.kept or KeptTokens.unrestricted(len(self.tokens))).split_ids()
        if options.routes and begun.routes is not None:
            self.routes = [begun.routes]

    def give(self, tokens: Sequence[int]) -> None:
        """Add tokens that were not drawn; the next turn begins behind them.

        Raises AlignerError where they leave no room for a token to be drawn.
        """
        if len(self.tokens) + len(tokens) >= self.limit:
            raise AlignerError(
                f"prompt {self.request.prompt.id}, sample {self.request.sample_index}:"
                f" {len(self.tokens)} response tokens and {len(tokens)} observation tokens leave no"
                f" room for a generated token; the limit is {self.limit} tokens"
            )
        self.drawn += [True] * (len(self.tokens) - len(self.drawn)) + [False] * len(tokens)
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [0] * len(tokens)
        self.kept += [NO_IDS] * len(tokens) if self.kept else []
        self.finish_reason = None

    def sample(self) -> Sample:
        """The response as it is, with its prompt."""
        prompt = self.request.prompt
        # What was told before is not made of numbers again: a turn costs what is new.
        told = self._told or replace(
            create_empty_samples([prompt], 1)[0], sample_index=self.request.sample_index
        )
        since, new = len(told.response), range(len(told.response), len(self.tokens))
        tokens, versions = torch.tensor(
            [self.tokens[since:], self.versions[since:]], dtype=torch.int64
        )
        logprobs = torch.tensor(self.logprobs[since:], dtype=torch.float32)
        marks = torch.tensor(
            [at >= len(self.drawn) or self.drawn[at] for at in new], dtype=torch.bool
        )
        had = torch.ones(since, dtype=torch.bool) if told.drawn is None else told.drawn
        self._told = replace(
            told,
            tokens=torch.cat((told.tokens.cpu(), tokens)),
            engine_logprobs=torch.cat((told.engine_logprobs, logprobs)),
            weight_versions=torch.cat((told.weight_versions, versions)),
            finish_reason=self.finish_reason or "unfinished",
            kept=self._kept_tokens() if self.kept else None,
            routes=torch.cat(self.routes) if self.tokens and self.routes else None,
            drawn=None if told.drawn is None and bool(marks.all()) else torch.cat((had, marks)),
        )
        return self._told

    def _kept_tokens(self) -> KeptTokens | None:
        """What each token was drawn among; None where among all."""
        counts = [0 if ids is NO_IDS else len(ids) for ids in self.kept]
        before = [0] * (len(self.tokens) - len(counts))  # given before anything was drawn
        return (
            KeptTokens.from_counts(torch.tensor(before + counts), torch.cat(self.kept))
            if any(counts)
            else None
        )
