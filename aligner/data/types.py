"""Data types of a training step: prompts, samples, batches of rows, and experience.

The module also contains the sampling support of generated tokens, a teacher's top-k log-probs, and
the functions that collate samples into padded batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.data.episode_reports import EpisodeReport

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class SamplingSupport:
    """Token ids that the sampler kept at each generated token, for example after top-k or top-p.

    The ids of all tokens are stored in one flat tensor. `counts` and `starts` have the shape of the
    tokens ([R], [N] or [B, S-1]) and locate the ids of each token in `ids`.
    """

    counts: Tensor
    """Number of token ids that could be sampled, int64 [...]; 0 means the whole vocabulary."""
    starts: Tensor
    """Index in `ids` of each token's first id, int64 [...]."""
    ids: Tensor
    """Token ids of all supports, int32 [K]."""

    @classmethod
    def from_counts(cls, counts: Tensor, ids: Tensor) -> Self:
        """Return the support of N tokens whose ids are stored consecutively.

        Args:
            counts: int64 [N].
            ids: int32 [K], where K is the sum of the counts.
        """
        return cls(counts, counts.cumsum(0) - counts, ids)

    @classmethod
    def unrestricted(cls, tokens: int) -> Self:
        """Return the support of `tokens` tokens, each sampled from the whole vocabulary."""
        zeros = torch.zeros(tokens, dtype=torch.int64)
        return cls(zeros, zeros, zeros[:0].int())

    def select(self, index: Any) -> Self:
        """Return the support of some tokens; `index` is any index of the tensor `counts`."""
        return replace(self, counts=self.counts[index], starts=self.starts[index])

    def flatten_ids(self) -> tuple[Tensor, Tensor]:
        """Return the supported ids of all tokens, one after another.

        Returns:
            The index of the token that each id belongs to, int64 [M], in the flat order of the
            tokens; and the id, int64 [M].
        """
        counts = self.counts.flatten()
        token = torch.repeat_interleave(counts)
        # Position of each id within its token's support: 0, 1, ..., count-1.
        offset = torch.arange(len(token), device=counts.device) - (counts.cumsum(0) - counts)[token]
        return token, self.ids[self.starts.flatten()[token] + offset].long()

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens."""
        return self.counts.shape

    def to_mask(self, size: int) -> Tensor:
        """Return which ids of a vocabulary of `size` tokens could be sampled, bool [N, size].

        The support must be that of a flat sequence of N tokens.
        """
        mask = (self.counts == 0)[:, None].repeat(1, size)
        return mask.index_put_(self.flatten_ids(), torch.tensor(True, device=mask.device))

    def split_ids(self) -> list[Tensor]:
        """Return the ids of each token, int32, in the flat order of the tokens."""
        return list(self.flatten_ids()[1].int().split(self.counts.flatten().tolist()))

    def to(self, device: torch.device) -> Self:
        """Return a copy on `device` that contains only the ids of these tokens."""
        compact = self.from_counts(self.counts.flatten(), self.flatten_ids()[1].int())
        starts = compact.starts.view(self.counts.shape)
        return replace(
            self,
            counts=self.counts.to(device),
            starts=starts.to(device),
            ids=compact.ids.to(device),
        )


@dataclass(frozen=True)
class Grammar:
    """A grammar that generated tokens follow (guided decoding)."""

    text: str
    """Grammar in llguidance's dialect of Lark."""
    stop_token_ids: tuple[int, ...]
    """Stop tokens, which are allowed if and only if the text so far is complete."""


@dataclass(frozen=True)
class GrammarSpan:
    """Generated tokens of a response that follow one grammar."""

    start: int
    """Index of the first token in the response."""
    end: int
    """Index after the last token in the response."""
    grammar: Grammar


@dataclass(frozen=True)
class GuidedTokens:
    """Grammars of the generated tokens of a batch, from which the trainer recomputes the masks.

    The masks themselves are not stored: one mask has as many bits as the vocabulary has tokens.
    """

    spans: Tensor
    """Index in `grammars` of the grammar of each token, int64 [...]; -1 for tokens that were
    sampled from the whole vocabulary. All tokens of an index are adjacent, and the first one is the
    first token of its text."""
    grammars: tuple[Grammar, ...]
    """Grammar of each span of tokens; equal grammars of different spans are different entries."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens."""
        return self.spans.shape

    def select(self, index: Any) -> Self:
        """Return the grammars of some tokens; `index` is any index of the tensor `spans`."""
        return replace(self, spans=self.spans[index])

    def to(self, device: torch.device) -> Self:
        """Return a copy on `device`."""
        return replace(self, spans=self.spans.to(device))


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's top-k log-probs at each position of some rows.

    Positions that the teacher did not score contain zeros.
    """

    logprobs: Tensor
    """Log-prob of the next token of the row, float32 [B, S-1]."""
    ids: Tensor
    """Ids of the k most probable tokens, int32 [B, S-1, k], most probable first."""
    outcomes: Tensor
    """Log-probs of these k tokens, and of all other tokens together, float32 [B, S-1, k+1]."""

    def pack(self) -> Tensor:
        """Return all values in one tensor, float32 [B, S-1, 2+2k], for the wire.

        float32 represents ids up to 2^24 exactly.
        """
        return torch.cat([self.logprobs[..., None], self.outcomes, self.ids.float()], -1)

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        """Return the object from which `pack` made the tensor."""
        count = packed.shape[-1] // 2 - 1
        return cls(packed[..., 0], packed[..., 2 + count :].int(), packed[..., 1 : 2 + count])


Stats = dict[str, Tensor]
"""Statistics by name, one number each."""

FinishReason = Literal["stop", "length", "unfinished"]
"""Reason why a response ended; an unfinished response is in flight, and generation can continue it
from the tokens that it has."""
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "unfinished")

ABSTAINED = -math.inf
"""Score of a sample for which the reward function abstained (returned None). A score of NaN means
that scoring failed. Neither is ever trained on; only samples whose scoring failed count as skipped.
"""


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt."""

    id: int
    """Index in the run's endless stream of prompts. The seed, this id and the sample index identify
    the random stream of a sample."""
    text: str
    tokens: Tensor
    """int64 [P]"""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """Origin of the record for messages, as FILE:LINE or DIRECTORY[INDEX]; "" if it has none."""


@dataclass(frozen=True)
class Sample:
    """One generated response with its prompt.

    A sample has at least one response token, unless it is unfinished. The response of an episode
    with several turns alternates between generated tokens of the model and observation tokens of
    the environment.
    """

    prompt_id: int
    sample_index: int
    tokens: Tensor
    """Prompt and response, including the EOS token if there is one, int64 [T]."""
    prompt_length: int
    engine_logprobs: Tensor
    """The engine's log-prob of each response token at the sampling temperature, float32 [R]; 0 for
    observation tokens."""
    weight_versions: Tensor
    """Version of the weights that generated each response token, int64 [R]; 0 for observation
    tokens."""
    finish_reason: FinishReason
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling_support: SamplingSupport | None = None
    """Sampling support of each response token [R], if the log-probs are normalized over the
    support; None if every token was sampled from the whole vocabulary."""
    expert_routing: Tensor | None = None
    """Expert routing for routing replay, uint8 or int16 [T-1, L, K]: the K experts that the engine
    chose for each token except the last, in each of L layers. Entry t was computed with the weights
    that generated token t+1. None if the engine does not report its routing."""
    generated_mask: Tensor | None = None
    """Mask of the response tokens that the model generated, bool [R]; the others are observation
    tokens. None means that the model generated all of them."""
    rewards: Tensor | None = None
    """Reward of an environment at each response token, float32 [R], 0 at most tokens; None without
    an environment."""
    grammar_spans: tuple[GrammarSpan, ...] = ()
    """Generated tokens that follow a grammar, in their order; their log-probs are normalized over
    the tokens that the grammar allows."""
    branches: tuple[Sample, ...] = ()
    """Further token sequences that the model generated in the same episode. The prompt of a branch
    is all context that the model read for it, and a branch has no branches. Branches train with the
    episode's score. In an environment's episode they were generated before the sample, in this
    order, and the first branch begins with the prompt of the data."""
    data_prompt: Tensor | None = None
    """Prompt of the data, int64 [P], if the first sequence begins with other tokens, because an
    agent has written its own prompt."""
    report: EpisodeReport | None = None
    """Failures and metrics of the episode; None if there are none. Branches have no report."""

    @property
    def response(self) -> Tensor:
        """Tokens after the prompt, int64 [R]."""
        return self.tokens[self.prompt_length :]

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """All token sequences of the episode: the branches, then the sample itself."""
        return (*self.branches, self)

    @property
    def initial_prompt(self) -> Tensor:
        """Prompt of the data for which the sample was requested, int64 [P]."""
        if self.data_prompt is not None:
            return self.data_prompt
        first = self.sequences[0]
        return first.tokens[: first.prompt_length]

    def with_data_prompt(self, prompt: Tensor) -> Self:
        """Return the sample with `prompt`, int64 [P], as the prompt of the data."""
        first = self.sequences[0]
        is_unchanged = torch.equal(first.tokens[: first.prompt_length], prompt)
        return replace(self, data_prompt=None if is_unchanged else prompt)

    @property
    def environment_reward(self) -> Tensor | None:
        """Sum of the environment's rewards in the episode, float32 []; None if it has none."""
        sums = [
            sequence.rewards.sum() for sequence in self.sequences if sequence.rewards is not None
        ]
        return torch.stack(sums).sum() if sums else None

    @property
    def generated_token_count(self) -> int:
        """Number of response tokens that the model generated."""
        return len(self.response) if self.generated_mask is None else int(self.generated_mask.sum())

    def split_turns(self) -> list[Tensor]:
        """Split the response into its turns, int64 each.

        The turns at even indices were generated by the model; the turns at odd indices are
        observations. The first turn is empty if the response begins with an observation.
        """
        if self.generated_mask is None:
            return [self.response]
        borders = (self.generated_mask[1:] != self.generated_mask[:-1]).nonzero()[:, 0] + 1
        turns = list(self.response.tensor_split(borders.tolist()))
        return turns if self.generated_mask[0] else [self.response[:0], *turns]

    @property
    def turn_count(self) -> int:
        """Number of turns that the model generated, including those of branches."""
        return sum(
            len(turn) > 0 for sequence in self.sequences for turn in sequence.split_turns()[::2]
        )

    def truncate(self, response_tokens: int, finish_reason: FinishReason) -> Self:
        """Return the sample with only its first `response_tokens` response tokens."""
        length = self.prompt_length + response_tokens
        sampling_support = self.sampling_support
        if sampling_support is not None:
            sampling_support = sampling_support.select(slice(response_tokens))
        # The last token has no entry, because the engine never ran the model on it.
        expert_routing = None
        if self.expert_routing is not None:
            expert_routing = self.expert_routing[: length - 1]
        generated_mask = None
        if self.generated_mask is not None:
            generated_mask = self.generated_mask[:response_tokens]

        return replace(
            self,
            tokens=self.tokens[:length],
            engine_logprobs=self.engine_logprobs[:response_tokens],
            weight_versions=self.weight_versions[:response_tokens],
            finish_reason=finish_reason,
            sampling_support=sampling_support,
            expert_routing=expert_routing,
            generated_mask=generated_mask,
            rewards=None if self.rewards is None else self.rewards[:response_tokens],
            grammar_spans=tuple(
                replace(span, end=min(span.end, response_tokens))
                for span in self.grammar_spans
                if span.start < response_tokens
            ),
        )

    def __post_init__(self) -> None:
        """Raise ValueError if a tensor does not have one entry per token."""
        response = self.tokens.numel() - self.prompt_length
        if response < (self.finish_reason != "unfinished"):
            raise ValueError(f"sample {self.prompt_id}/{self.sample_index} has no response tokens")
        support = self.sampling_support
        parts = {
            "log-probs": self.engine_logprobs,
            "weight versions": self.weight_versions,
            "kept-token counts": None if support is None else support.counts,
            "marks of generated tokens": self.generated_mask,
            "rewards": self.rewards,
        }
        if mismatches := [
            f"{name} of shape {tuple(part.shape)}"
            for name, part in parts.items()
            if part is not None and part.shape != (response,)
        ]:
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: expected shape {(response,)}, one"
                f" entry per response token, got {' and '.join(mismatches)}"
            )
        if any(not 0 <= span.start < span.end <= response for span in self.grammar_spans):
            spans = [(span.start, span.end) for span in self.grammar_spans]
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: grammar spans {spans} must be in the"
                f" response of {response} tokens"
            )
        if self.expert_routing is not None and (
            self.expert_routing.ndim != 3 or len(self.expert_routing) != self.tokens.numel() - 1
        ):
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: expert routing has"
                f" shape {tuple(self.expert_routing.shape)}, must cover {self.tokens.numel() - 1}"
                " tokens"
            )


CompletionReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Completion:
    """The generated tokens of one call of `generate`."""

    tokens: Tensor
    """int64 [R]"""
    logprobs: Tensor
    """float32 [R]: log-probs at the sampling temperature"""
    weight_versions: Tensor
    """int64 [R]: the weight version that generated each token"""
    finish_reason: CompletionReason
    """`stop`: the last token is a stop token; `length`: `max_new_tokens` is reached; `interrupted`:
    the engine was asked to return the tokens generated so far (partial rollout)."""
    sampling_support: SamplingSupport | None = None
    """[R]: sampling support of each token; None: the full vocabulary everywhere"""
    expert_routing: Tensor | None = None
    """uint8 or int16 [T+R-1, L, K]: expert routing of all T input and R generated tokens but the
    last; None if it was not requested"""
    grammar: Grammar | None = None
    """The grammar that the tokens follow; None: they follow none."""
    grammar_start: int = 0
    """Index of the first token of input and completion that follows the grammar: the input ends
    with earlier tokens of the text if the call continues an interrupted one."""


def create_empty_samples(prompts: Sequence[Prompt], samples_per_prompt: int) -> list[Sample]:
    """Return unfinished samples without response tokens; the samples of a prompt are adjacent."""
    empty = torch.empty(0)
    return [
        Sample(
            prompt.id,
            index,
            prompt.tokens,
            prompt.tokens.numel(),
            empty,
            empty.long(),
            "unfinished",
            prompt.metadata,
        )
        for prompt in prompts
        for index in range(samples_per_prompt)
    ]


@dataclass(frozen=True)
class Rows:
    """Token sequences to train on, padded on the right.

    Subclasses add tensors of shape [B], or of shape [B, S-1, ...] whose entry t refers to token
    t+1, or a sampling support [B, S-1]. Each of these fields may be None.
    """

    tokens: Tensor
    """int64 [B, S]"""
    lengths: Tensor
    """Number of tokens of each row without padding, int64 [B]."""
    mask: Tensor
    """Loss mask, bool [B, S-1]: true if the row trains on token t+1."""
    sampling_support: SamplingSupport | None = field(default=None, kw_only=True)
    """Sampling support [B, S-1], if the log-probs are normalized over the support; None if every
    token was sampled from the whole vocabulary."""
    guided_tokens: GuidedTokens | None = field(default=None, kw_only=True)
    """Grammars of the tokens [B, S-1], over whose allowed tokens the log-probs are normalized; None
    if no token follows a grammar."""
    expert_routing: Tensor | None = field(default=None, kw_only=True)
    """Expert routing for routing replay, uint8 or int16 [B, S-1, L, K]: the experts that the engine
    chose for token t (not t+1); 0 after the last token that the engine computed."""
    candidates: Tensor | None = field(default=None, kw_only=True)
    """Ids of further tokens whose log-probs the loss needs, such as a teacher's most probable
    tokens, int32 [B, S-1, k]."""
    candidate_logprobs: Tensor | None = field(default=None, kw_only=True)
    """The policy's log-probs of the candidates, and of all other tokens together, float32
    [B, S-1, k+1]. They are differentiable. None outside a loss."""
    candidate_targets: Tensor | None = field(default=None, kw_only=True)
    """A teacher's log-probs of the candidates, and of all other tokens together, float32
    [B, S-1, k+1]."""

    def __post_init__(self) -> None:
        """Raise ValueError if a tensor does not have the shape of the rows."""
        batch, length = self.tokens.shape
        if self.lengths.shape != (batch,):
            raise ValueError(
                f"lengths: got shape {tuple(self.lengths.shape)}, must be {(batch,)} for tokens of"
                f" shape {tuple(self.tokens.shape)}"
            )
        for name, member in self._members().items():
            shape = member.shape
            expected = (batch,) if len(shape) == 1 else (batch, length - 1)
            if name != "tokens" and shape[:2] != expected:
                raise ValueError(f"{name}: got shape {tuple(shape)}, must be {expected}")

    @property
    def kept(self) -> SamplingSupport | None:
        """Old name of `sampling_support`, for custom losses; it works for one release."""
        warnings.warn(
            "the attribute `kept` is now called `sampling_support`; the old name works for one"
            " release",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.sampling_support

    def select(self, rows: Tensor, width: int | None = None) -> Self:
        """Return some rows in the given order.

        Args:
            rows: Row indices, int64 [N].
            width: Number of tokens to which the rows are truncated; None keeps the width.
        """
        length = self.tokens.shape[1] if width is None else width

        def select_rows(name: str, member: Any) -> Any:
            if isinstance(member, SamplingSupport | GuidedTokens):
                return member.select((rows, slice(length - 1)))
            return (
                member[rows]
                if member.ndim == 1
                else member[rows, : length if name == "tokens" else length - 1]
            )

        return replace(
            self, **{name: select_rows(name, member) for name, member in self._members().items()}
        )

    def to(self, device: torch.device) -> Self:
        """Return a copy of the rows on a device."""
        return replace(
            self, **{name: member.to(device) for name, member in self._members().items()}
        )

    def _members(self) -> dict[str, Any]:
        """Return the fields that are not None, by name."""
        members = {member.name: getattr(self, member.name) for member in fields(self)}
        return {name: member for name, member in members.items() if member is not None}


RowsT = TypeVar("RowsT", bound=Rows)


@dataclass(frozen=True)
class SampleBatch(Rows):
    """A batch of samples; the mask selects the response tokens that the model generated."""

    prompt_lengths: Tensor
    """int64 [B]"""
    engine_logprobs: Tensor
    """float32 [B, S-1], 0 outside the mask"""
    weight_versions: Tensor
    """int64 [B, S-1], 0 outside the mask"""
    finish_reasons: Tensor
    """Indices into FINISH_REASONS, int64 [B]."""
    groups: Tensor
    """Index of the row's prompt, int64 [B]; the samples of a prompt are adjacent."""
    turn_rewards: Tensor | None = field(default=None, kw_only=True)
    """Rewards of environments and of process rewards, float32 [B, S-1], 0 outside the mask; None
    without any."""
    step_ends: Tensor | None = field(default=None, kw_only=True)
    """Mask of the last tokens of the steps that a process reward scores, bool [B, S-1]; None if the
    reward scores whole responses."""
    episodes: Tensor | None = field(default=None, kw_only=True)
    """Episode number of each row, int64 [B]. The first row of an episode is its sample, the others
    are its branches. None means that each row is an episode by itself."""
    row_ids: Tensor | None = field(default=None, kw_only=True)
    """Index of each row in the step's batch, int64 [B], which a later selection of rows preserves;
    None if nothing needs it."""

    @property
    def last_turn_starts(self) -> Tensor:
        """Index of the first token of the model's last turn, int64 [B]; for a response with one
        turn, its first token."""
        observed = (
            build_response_mask(self.lengths, self.prompt_lengths, self.tokens.shape[1])
            & ~self.mask
        )
        # For each observation token, the index of the token after it.
        next_token = torch.arange(2, self.tokens.shape[1] + 1) * observed
        return torch.maximum(next_token.amax(1), self.prompt_lengths)

    @property
    def samples_per_prompt(self) -> int:
        """Number of samples of each prompt, without branches.

        Raises:
            ValueError: The prompts have different numbers of samples.
        """
        groups = self.groups if self.episodes is None else self.groups[~self.is_branch]
        counts = groups.unique_consecutive(return_counts=True)[1].unique().tolist()
        if len(counts) > 1:
            raise ValueError(
                f"prompts have {' or '.join(map(str, counts))} samples, must all have the same"
                " number of samples; a reward function that abstains makes them differ, so use"
                " `groups` instead of `samples_per_prompt`"
            )
        return counts[0] if counts else 1

    @property
    def episode_indices(self) -> Tensor:
        """Index of each row's episode, int64 [B]; episodes are numbered from 0 in the order of
        their first rows."""
        if self.episodes is None:
            return torch.arange(len(self.tokens))
        indices: dict[int, int] = {}
        return torch.tensor(
            [indices.setdefault(episode, len(indices)) for episode in self.episodes.tolist()],
            dtype=torch.int64,
        )

    @property
    def is_branch(self) -> Tensor:
        """Mask of the rows that are not the first row of their episode, bool [B]."""
        indices = self.episode_indices
        # Largest episode index before each row. A row with a larger index begins a new episode.
        newest = (
            torch.cat((indices[:1] - 1, indices[:-1])).cummax(0)[0] if len(indices) else indices
        )
        return indices <= newest

    def with_step_rewards(self, rewards: Tensor) -> Self:
        """Return the batch with the rewards of the samples' steps added to `turn_rewards`.

        Args:
            rewards: Reward of the step that ends at each token, float32 [N, S-1]; NaN where no step
                ends. It covers the first N rows, which are the samples; the other rows are
                branches.
        """
        ends = torch.zeros_like(self.mask)
        step_rewards = torch.zeros(self.mask.shape)
        ends[: len(rewards)] = self.mask[: len(rewards)] & ~rewards.isnan()
        step_rewards[ends] = rewards[ends[: len(rewards)]]
        return replace(
            self,
            turn_rewards=step_rewards
            if self.turn_rewards is None
            else self.turn_rewards + step_rewards,
            step_ends=ends,
        )

    def get_rows_with_branches(self, samples: Tensor) -> Tensor:
        """Return the given rows followed by the rows of their branches, int64 [N].

        In a batch all branches follow all samples.
        """
        if self.episodes is None:
            return samples
        branches = self.is_branch & torch.isin(self.episodes, self.episodes[samples])
        return torch.cat((samples, branches.nonzero()[:, 0]))


@dataclass(frozen=True)
class ScoredSamples(SampleBatch):
    """A step's samples with the scores, values and log-probs from which an advantage estimator
    computes advantages."""

    scores: Tensor
    """Scores after penalties, float32 [B]."""
    rewards: Tensor
    """Reward per token, float32 [B, S-1]: the score on the last response token, minus the KL
    penalty of the reward; 0 outside the mask."""
    values: Tensor | None
    """float32 [B, S-1]; None without a critic"""
    old_logprobs: Tensor
    """The trainer's log-probs before the step's first update, float32 [B, S-1]. They are NaN until
    the first update if only the loss needs them."""
    reference_logprobs: Tensor
    """Log-probs of the reference model, the initial model, float32 [B, S-1]."""
    cut_values: Tensor | None = field(default=None, kw_only=True)
    """The critic's value after the last token of a response that generation truncated, float32 [B];
    0 for a response that ended. None unless `algorithm.bootstrap_cut` is set."""
    teacher_logprobs: Tensor | None = field(default=None, kw_only=True)
    """Log-probs of the teacher, float32 [B, S-1], 0 after a row's end; None without a teacher."""


@dataclass(frozen=True)
class Experience(ScoredSamples):
    """A step's samples with advantages and returns: the rows that a policy loss receives."""

    advantages: Tensor
    """float32 [B, S-1]"""
    returns: Tensor | None
    """Targets of the values, float32 [B, S-1]; None without a critic."""
    entropies: Tensor | None = field(default=None, kw_only=True)
    """The policy's entropies during the first update of each row, float32 [B, S-1]; NaN for rows
    without an update. None if nothing needs them."""


PolicyLoss: TypeAlias = Callable[[Tensor, Tensor, RowsT, float], tuple[Tensor, Stats]]
"""`loss(logprobs, entropy, rows, denominator)` returns the loss of some rows and its statistics.

The loss and the statistics are sums over the rows divided by `denominator`, which belongs to the
whole minibatch. `logprobs` and `entropy` [N, L-1] are differentiable, and zero outside the rows'
mask.
"""


def build_response_mask(lengths: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
    """Return the mask of response tokens, bool [B, width-1]: entry t is true if token t+1 belongs
    to the response."""
    target = torch.arange(1, width)
    return (target >= prompt_lengths[:, None]) & (target < lengths[:, None])


def unpack_token_masks(masks: Tensor, first: int, count: int) -> Tensor:
    """Return whether each of `count` token ids from `first` on is allowed, bool [N, count].

    Args:
        masks: Bit i % 32 of entry i // 32 belongs to token i, int32 [N, W]. Ids after the last bit
            are not allowed.
        first: First token id.
        count: Number of token ids.
    """
    ids = torch.arange(first, first + count, device=masks.device)
    words = masks[:, (ids >> 5).clamp_max(masks.shape[1] - 1)]
    return ((words >> (ids & 31)) & 1).bool() & (ids < 32 * masks.shape[1])


def concatenate_support(samples: Sequence[Sample]) -> SamplingSupport | None:
    """Concatenate the sampling supports of all response tokens; return None if no sample has one.

    Tokens of samples without a support get the whole vocabulary.
    """
    if all(sample.sampling_support is None for sample in samples):
        return None
    supports = [
        sample.sampling_support or SamplingSupport.unrestricted(len(sample.response))
        for sample in samples
    ]
    return SamplingSupport.from_counts(
        torch.cat([support.counts for support in supports]),
        torch.cat([support.flatten_ids()[1] for support in supports]).int(),
    )


def collate_grammars(samples: Sequence[Sample], width: int) -> GuidedTokens | None:
    """Return the grammars of the tokens of samples that are padded to `width` tokens, [B, width-1];
    None if no token follows a grammar."""
    if not any(sample.grammar_spans for sample in samples):
        return None
    spans = torch.full((len(samples), width - 1), -1)
    grammars: list[Grammar] = []
    for row, sample in enumerate(samples):
        # Entry t of a row belongs to token t+1.
        offset = sample.prompt_length - 1
        for span in sample.grammar_spans:
            spans[row, offset + span.start : offset + span.end] = len(grammars)
            grammars.append(span.grammar)
    return GuidedTokens(spans, tuple(grammars))


def concatenate_response_values(
    samples: Sequence[Sample], name: Literal["generated_mask", "rewards"]
) -> Tensor | None:
    """Concatenate `generated_mask` or `rewards` of all response tokens.

    Returns None if no sample has it. For samples without it, all tokens are generated and have the
    reward 0.
    """
    values = [getattr(sample, name) for sample in samples]
    if all(part is None for part in values):
        return None
    fill = torch.ones if name == "generated_mask" else torch.zeros
    dtype = torch.bool if name == "generated_mask" else torch.float32
    parts = zip(values, samples, strict=True)
    return torch.cat(
        [
            fill(len(sample.response), dtype=dtype) if part is None else part
            for part, sample in parts
        ]
    )


def collate(samples: Sequence[Sample], pad_token_id: int) -> SampleBatch:
    """Pad samples on the right to the longest one and return them as a batch.

    The batch contains no branches. It has expert routing only if every sample has it.
    """
    lengths = torch.tensor([sample.tokens.numel() for sample in samples])
    prompt_lengths = torch.tensor([sample.prompt_length for sample in samples])
    tokens = pad_sequence(
        [sample.tokens for sample in samples], batch_first=True, padding_value=pad_token_id
    )

    # Until generated tokens are separated from observations below, the mask is that of the
    # responses, so that concatenated values of response tokens can be scattered with it.
    mask = build_response_mask(lengths, prompt_lengths, tokens.shape[1])
    logprobs = torch.zeros(mask.shape)
    versions = torch.zeros(mask.shape, dtype=torch.int64)
    logprobs[mask] = torch.cat([sample.engine_logprobs for sample in samples])
    versions[mask] = torch.cat([sample.weight_versions for sample in samples])
    rewards = None
    if (turn_rewards := concatenate_response_values(samples, "rewards")) is not None:
        rewards = torch.zeros(mask.shape).masked_scatter_(mask, turn_rewards)
    reasons = torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in samples])
    groups = torch.tensor([sample.prompt_id for sample in samples]).unique_consecutive(
        return_inverse=True
    )[1]

    support = concatenate_support(samples)
    routing = None
    if support is not None:
        counts = torch.zeros(mask.shape, dtype=torch.int64)
        starts = torch.zeros(mask.shape, dtype=torch.int64)
        counts[mask] = support.counts
        starts[mask] = support.starts
        support = SamplingSupport(counts, starts, support.ids)

    if (generated := concatenate_response_values(samples, "generated_mask")) is not None:
        mask = mask.masked_scatter(mask, generated)
    sample_routing = [
        sample.expert_routing for sample in samples if sample.expert_routing is not None
    ]
    if len(sample_routing) == len(samples):
        routing = pad_sequence(sample_routing, batch_first=True)
    columns = (tokens, lengths, mask, prompt_lengths, logprobs, versions, reasons, groups)
    return SampleBatch(
        *columns,
        sampling_support=support,
        guided_tokens=collate_grammars(samples, tokens.shape[1]),
        expert_routing=routing,
        turn_rewards=rewards,
    )


def collate_episodes(samples: Sequence[Sample], pad_token_id: int) -> SampleBatch:
    """Collate samples as `collate` does, and append the samples' branches as further rows."""
    branch_parents = [index for index, sample in enumerate(samples) for _ in sample.branches]
    if not branch_parents:
        return collate(samples, pad_token_id)
    batch = collate(
        [*samples, *(branch for sample in samples for branch in sample.branches)], pad_token_id
    )
    episodes = torch.tensor([*range(len(samples)), *branch_parents])
    return replace(batch, episodes=episodes, groups=batch.groups[episodes])
