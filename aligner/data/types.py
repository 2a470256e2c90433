"""What flows through a step: prompts, samples, experience."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class KeptTokens:
    """What tokens were drawn among where sampling left some of the vocabulary out, as top-k and
    top-p do."""

    counts: Tensor
    """int64 [...]: to how many each one's choice was left; 0: to all"""
    starts: Tensor
    """int64 [...]: where in `ids` these begin"""
    ids: Tensor
    """int32 [K]: token ids"""

    @classmethod
    def in_order(cls, counts: Tensor, ids: Tensor) -> Self:
        """Of counts [N], whose ids are one after another."""
        return cls(counts, counts.cumsum(0) - counts, ids)

    @classmethod
    def of_all(cls, tokens: int) -> Self:
        """Of so many tokens, each drawn among all."""
        none = torch.zeros(tokens, dtype=torch.int64)
        return cls(none, none, none[:0].int())

    def at(self, index: Any) -> Self:
        """Those of some tokens: `index` is one of `counts`."""
        return replace(self, counts=self.counts[index], starts=self.starts[index])

    def in_rows(self) -> tuple[Tensor, Tensor]:
        """Every id that these tokens kept, int64 [M], behind which token's it is, int64 [M],
        counted over their flat order."""
        counts = self.counts.flatten()
        token = torch.repeat_interleave(counts)
        place = torch.arange(len(token), device=counts.device) - (counts.cumsum(0) - counts)[token]
        return token, self.ids[self.starts.flatten()[token] + place].long()

    def among(self, size: int) -> Tensor:
        """bool [N, V]: which tokens of a vocabulary of V each of these [N] was drawn among."""
        kept = (self.counts == 0)[:, None].repeat(1, size)
        return kept.index_put_(self.in_rows(), torch.tensor(True, device=kept.device))

    def each(self) -> list[Tensor]:
        """The ids of every token, int32, in flat order."""
        return list(self.in_rows()[1].int().split(self.counts.flatten().tolist()))

    def to(self, device: torch.device) -> Self:
        """The same on a device, with no ids but these tokens'."""
        own = self.in_order(self.counts.flatten(), self.in_rows()[1].int())
        starts = own.starts.view(self.counts.shape)
        return replace(
            self, counts=self.counts.to(device), starts=starts.to(device), ids=own.ids.to(device)
        )


@dataclass(frozen=True)
class TaughtTokens:
    """A teacher's distribution at each place of some rows, by its k most probable tokens; zeros
    where it was not asked."""

    logprobs: Tensor
    """float32 [B, S-1]: of the token that follows"""
    ids: Tensor
    """int32 [B, S-1, k]: the most probable ones, in their order"""
    outcomes: Tensor
    """float32 [B, S-1, k+1]: the log-probs of these, and that of all other tokens together"""

    def packed(self) -> Tensor:
        """All of it as float32 [B, S-1, 2+2k], in which ids are exact up to 2^24."""
        return torch.cat([self.logprobs[..., None], self.outcomes, self.ids.float()], -1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Self:
        """What `packed` gave."""
        count = packed.shape[-1] // 2 - 1
        return cls(packed[..., 0], packed[..., 2 + count :].int(), packed[..., 1 : 2 + count])


Stats = dict[str, Tensor]
"""Statistics by name, one number each."""

FinishReason = Literal["stop", "length", "unfinished"]
"""Why a response ended; an unfinished one is under way, and can go on from the tokens that it has.
"""
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "unfinished")

ABSTAINED = -math.inf
"""Score of a sample for which the reward function abstained (returned None). A score of NaN means
that scoring failed. Neither is ever trained on; only samples whose scoring failed count as skipped.
"""


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt."""

    id: int
    """Its place in the run's endless stream: with the seed and the sample index it names a sample's
    random stream."""
    text: str
    tokens: Tensor
    """int64 [P]"""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """FILE:LINE or DIRECTORY[INDEX] of its record, for messages; "" where it has none."""


@dataclass(frozen=True)
class Sample:
    """One generated response with its prompt. It has a token at least, unless it is unfinished.

    What follows the prompt of an episode of several turns is drawn and given by turns: what the
    model says, what it is told.
    """

    prompt_id: int
    sample_index: int
    tokens: Tensor
    """int64 [T]: prompt and response, the end-of-sequence token included where there is one."""
    prompt_length: int
    engine_logprobs: Tensor
    """float32 [R]: log-probability of each response token at the sampling temperature by the
    engine; 0 of given ones."""
    weight_versions: Tensor
    """int64 [R]: version of the weights that drew each response token; 0 of given ones."""
    finish_reason: FinishReason
    metadata: Mapping[str, Any] = field(default_factory=dict)
    kept: KeptTokens | None = None
    """[R]: what each response token was drawn among, where log-probs are of these alone; None:
    everywhere all"""
    routes: Tensor | None = None
    """uint8 or int16 [T-1, L, K]: the experts that the engine chose for each token but the last, in
    each of L layers; those of the weights that drew the token after it. None where the engine does
    not tell."""
    drawn: Tensor | None = None
    """bool [R]: which response tokens the model drew, the others were given to it; None: all"""
    rewards: Tensor | None = None
    """float32 [R]: what an environment gave for each response token, 0 for most; None without one
    """
    branches: tuple[Sample, ...] = ()
    """What else the model drew in the same episode, where its tokens are not all one sequence: each
    with all that it read as its prompt, and no branches of its own. They are learned from with the
    episode's score. In an environment's episode they came before the sample, in this order; the
    first one begins with the prompt of the data."""

    @property
    def response(self) -> Tensor:
        """int64 [R]: the tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """All that the model drew in the episode: the branches, and the sample itself last."""
        return (*self.branches, self)

    @property
    def asked(self) -> Tensor:
        """int64 [P]: the prompt that an environment's episode, or a single response, began with."""
        first = self.sequences[0]
        return first.tokens[: first.prompt_length]

    @property
    def environment_reward(self) -> Tensor | None:
        """float32 []: all that an environment gave in the episode; None without one."""
        given = [each.rewards.sum() for each in self.sequences if each.rewards is not None]
        return torch.stack(given).sum() if given else None

    @property
    def drawn_count(self) -> int:
        """How many response tokens the model drew."""
        return len(self.response) if self.drawn is None else int(self.drawn.sum())

    def turns(self) -> list[Tensor]:
        """The response in parts, int64 each, of which every second, from the second on, was
        given."""
        if self.drawn is None:
            return [self.response]
        borders = (self.drawn[1:] != self.drawn[:-1]).nonzero()[:, 0] + 1
        parts = list(self.response.tensor_split(borders.tolist()))
        return parts if self.drawn[0] else [self.response[:0], *parts]

    @property
    def turn_count(self) -> int:
        """How many turns the model drew, those of branches included."""
        return sum(len(turn) > 0 for sequence in self.sequences for turn in sequence.turns()[::2])

    def cut(self, response_tokens: int, finish_reason: FinishReason) -> Self:
        """The sample with its first so many response tokens."""
        length = self.prompt_length + response_tokens
        return replace(
            self,
            tokens=self.tokens[:length],
            engine_logprobs=self.engine_logprobs[:response_tokens],
            weight_versions=self.weight_versions[:response_tokens],
            finish_reason=finish_reason,
            kept=None if self.kept is None else self.kept.at(slice(response_tokens)),
            routes=None if self.routes is None else self.routes[: length - 1],
            drawn=None if self.drawn is None else self.drawn[:response_tokens],
            rewards=None if self.rewards is None else self.rewards[:response_tokens],
        )

    def __post_init__(self) -> None:
        response = self.tokens.numel() - self.prompt_length
        if response < (self.finish_reason != "unfinished"):
            raise ValueError(f"sample {self.prompt_id}/{self.sample_index} has no response tokens")
        parts = {
            "log-probs": self.engine_logprobs,
            "weight versions": self.weight_versions,
            "kept-token counts": None if self.kept is None else self.kept.counts,
            "marks of generated tokens": self.drawn,
            "rewards": self.rewards,
        }
        if wrong := [
            f"{name} of shape {tuple(part.shape)}"
            for name, part in parts.items()
            if part is not None and part.shape != (response,)
        ]:
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: expected shape {(response,)}, one"
                f" entry per response token, got {' and '.join(wrong)}"
            )
        if self.routes is not None and (
            self.routes.ndim != 3 or len(self.routes) != self.tokens.numel() - 1
        ):
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: expert routing has"
                f" shape {tuple(self.routes.shape)}, must cover {self.tokens.numel() - 1} tokens"
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
    the engine was asked to return what it has (partial rollout)."""
    kept: KeptTokens | None = None
    """[R]: sampling support of each token; None: the full vocabulary everywhere"""
    routes: Tensor | None = None
    """uint8 or int16 [T+R-1, L, K]: expert routing of all T input and R generated tokens but the
    last; None if it was not requested"""


def unbegun(prompts: Sequence[Prompt], samples_per_prompt: int) -> list[Sample]:
    """Each prompt's samples in a row, unfinished and without a token."""
    none = torch.empty(0)
    return [
        Sample(
            prompt.id,
            index,
            prompt.tokens,
            prompt.tokens.numel(),
            none,
            none.long(),
            "unfinished",
            prompt.metadata,
        )
        for prompt in prompts
        for index in range(samples_per_prompt)
    ]


@dataclass(frozen=True)
class Rows:
    """Sequences to learn from, right-padded.

    Subclasses add tensors [B], or [B, S-1, ...] with entry t for token t+1, kept tokens [B, S-1],
    or None.
    """

    tokens: Tensor
    """int64 [B, S]"""
    lengths: Tensor
    """int64 [B]"""
    mask: Tensor
    """bool [B, S-1]: true where token t+1 is learned from"""
    kept: KeptTokens | None = field(default=None, kw_only=True)
    """[B, S-1]: what tokens were drawn among, where their log-probs are of these alone; None:
    everywhere all"""
    routes: Tensor | None = field(default=None, kw_only=True)
    """uint8 or int16 [B, S-1, L, K]: the experts that the engine chose for token t (not t+1), 0
    behind the last that it ran"""
    candidates: Tensor | None = field(default=None, kw_only=True)
    """int32 [B, S-1, k]: tokens whose log-probs the loss sees beside the row's own, such as a
    teacher's most probable ones"""
    candidate_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float32 [B, S-1, k+1]: the policy's of these, and of all other tokens together;
    differentiable, None but in a loss"""
    candidate_targets: Tensor | None = field(default=None, kw_only=True)
    """float32 [B, S-1, k+1]: a teacher's of the same"""

    def __post_init__(self) -> None:
        batch, length = self.tokens.shape
        if self.lengths.shape != (batch,):
            raise ValueError(
                f"lengths: got shape {tuple(self.lengths.shape)}, must be {(batch,)} for tokens of"
                f" shape {tuple(self.tokens.shape)}"
            )
        for name, member in self._members().items():
            shape = member.shape if isinstance(member, Tensor) else member.counts.shape
            allowed = (batch,) if len(shape) == 1 else (batch, length - 1)
            if name != "tokens" and shape[:2] != allowed:
                raise ValueError(f"{name}: got shape {tuple(shape)}, must be {allowed}")

    def select(self, rows: Tensor, width: int | None = None) -> Self:
        """Some rows (int64 [N]), in that order, cut to `width` tokens."""
        length = self.tokens.shape[1] if width is None else width

        def picked(name: str, member: Any) -> Any:
            if isinstance(member, KeptTokens):
                return member.at((rows, slice(length - 1)))
            return (
                member[rows]
                if member.ndim == 1
                else member[rows, : length if name == "tokens" else length - 1]
            )

        return replace(
            self, **{name: picked(name, member) for name, member in self._members().items()}
        )

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return replace(
            self, **{name: member.to(device) for name, member in self._members().items()}
        )

    def _members(self) -> dict[str, Any]:
        members = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: member for name, member in members.items() if member is not None}


RowsT = TypeVar("RowsT", bound=Rows)


@dataclass(frozen=True)
class SampleBatch(Rows):
    """Samples; the mask is that of the response tokens that were drawn."""

    prompt_lengths: Tensor
    """int64 [B]"""
    engine_logprobs: Tensor
    """float32 [B, S-1], 0 outside the mask"""
    weight_versions: Tensor
    """int64 [B, S-1], 0 outside the mask"""
    finish_reasons: Tensor
    """int64 [B]: places in FINISH_REASONS"""
    groups: Tensor
    """int64 [B]: the number of the row's prompt; the samples of a prompt are next to each other"""
    turn_rewards: Tensor | None = field(default=None, kw_only=True)
    """float32 [B, S-1]: what environments, and rewards of steps, gave, 0 outside the mask; None
    without any"""
    step_ends: Tensor | None = field(default=None, kw_only=True)
    """bool [B, S-1]: the tokens that end steps which the reward speaks of; None where it speaks of
    whole responses"""
    episodes: Tensor | None = field(default=None, kw_only=True)
    """int64 [B]: which rows are of one episode, the first of these its sample's, the others its
    branches'; None: each alone"""
    row_ids: Tensor | None = field(default=None, kw_only=True)
    """int64 [B]: which of a step's rows each is, whatever was selected since; None where nobody
    asks"""

    @property
    def last_turns(self) -> Tensor:
        """int64 [B]: where what the model said last begins; of a response that is one turn its
        first token."""
        given = response_mask(self.lengths, self.prompt_lengths, self.tokens.shape[1]) & ~self.mask
        # of each given token the place behind it
        behind = torch.arange(2, self.tokens.shape[1] + 1) * given
        return torch.maximum(behind.amax(1), self.prompt_lengths)

    @property
    def samples_per_prompt(self) -> int:
        """Samples of each prompt, branches not counted. Raises ValueError where prompts have
        different numbers of them."""
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
    def places(self) -> Tensor:
        """int64 [B]: which of the episodes each row is of, 0 that of the first row."""
        if self.episodes is None:
            return torch.arange(len(self.tokens))
        places: dict[int, int] = {}
        return torch.tensor(
            [places.setdefault(episode, len(places)) for episode in self.episodes.tolist()],
            dtype=torch.int64,
        )

    @property
    def is_branch(self) -> Tensor:
        """bool [B]: which rows are not the first of their episode."""
        places = self.places
        newest = torch.cat((places[:1] - 1, places[:-1])).cummax(0)[0] if len(places) else places
        return places <= newest

    def with_step_rewards(self, rewards: Tensor) -> Self:
        """With what the steps of samples got, float32 [N, S-1], not a number where none ends, of
        the first N rows.

        The others are branches.
        """
        ends, given = torch.zeros_like(self.mask), torch.zeros(self.mask.shape)
        ends[: len(rewards)] = self.mask[: len(rewards)] & ~rewards.isnan()
        given[ends] = rewards[ends[: len(rewards)]]
        return replace(
            self,
            turn_rewards=given if self.turn_rewards is None else self.turn_rewards + given,
            step_ends=ends,
        )

    def with_branches(self, samples: Tensor) -> Tensor:
        """The rows of some episodes, and behind them their branches', int64 [N]; all branches are
        behind all samples."""
        if self.episodes is None:
            return samples
        branches = self.is_branch & torch.isin(self.episodes, self.episodes[samples])
        return torch.cat((samples, branches.nonzero()[:, 0]))


@dataclass(frozen=True)
class ScoredSamples(SampleBatch):
    """A step's samples with what is known of them before anything is learned: what an advantage
    estimator sees."""

    scores: Tensor
    """float32 [B], after penalties"""
    rewards: Tensor
    """float32 [B, S-1]: the score on the last response token, less a KL penalty in the reward; 0
    outside the mask"""
    values: Tensor | None
    """float32 [B, S-1]; None without a critic"""
    old_logprobs: Tensor
    """float32 [B, S-1]: the trainer's, before the step's first update; NaN until then where nothing
    else asks for them"""
    reference_logprobs: Tensor
    """float32 [B, S-1]: the initial model's"""
    cut_values: Tensor | None = field(default=None, kw_only=True)
    """float32 [B]: the critic's value behind the last token of a response that generation cut, 0
    for one that has ended; None unless `algorithm.bootstrap_cut` asks for it"""
    teacher_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float32 [B, S-1]: the teacher's, 0 past a row's end; None without one"""


@dataclass(frozen=True)
class Experience(ScoredSamples):
    """A step's samples with what an online algorithm makes of them: what a loss sees."""

    advantages: Tensor
    """float32 [B, S-1]"""
    returns: Tensor | None
    """float32 [B, S-1]: what the values should have been; None without a critic"""
    entropies: Tensor | None = field(default=None, kw_only=True)
    """float32 [B, S-1]: the policy's, as each row's first update found it, NaN without one; None
    where nobody asks"""


PolicyLoss: TypeAlias = Callable[[Tensor, Tensor, RowsT, float], tuple[Tensor, Stats]]
"""`loss(logprobs, entropy, rows, denominator)` and statistics of some rows, as sums over what
speaks of the whole minibatch.

The first two [N, L-1] are zero outside the rows' mask; both are differentiable.
"""


def response_mask(lengths: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
    """bool [B, width-1]: entry t is true where token t+1 belongs to the response."""
    target = torch.arange(1, width)
    return (target >= prompt_lengths[:, None]) & (target < lengths[:, None])


def kept_by(samples: Sequence[Sample]) -> KeptTokens | None:
    """What the response tokens of these samples were drawn among, one after another; None where no
    sample tells."""
    if all(sample.kept is None for sample in samples):
        return None
    kept = [sample.kept or KeptTokens.of_all(len(sample.response)) for sample in samples]
    return KeptTokens.in_order(
        torch.cat([each.counts for each in kept]),
        torch.cat([each.in_rows()[1] for each in kept]).int(),
    )


def of_responses(samples: Sequence[Sample], name: Literal["drawn", "rewards"]) -> Tensor | None:
    """`drawn` or `rewards` of all response tokens, one after another; None where no sample
    tells."""
    told = [getattr(sample, name) for sample in samples]
    if all(part is None for part in told):
        return None
    usual = torch.ones if name == "drawn" else torch.zeros
    dtype = torch.bool if name == "drawn" else torch.float32
    parts = zip(told, samples, strict=True)
    return torch.cat(
        [
            usual(len(sample.response), dtype=dtype) if part is None else part
            for part, sample in parts
        ]
    )


def collate(samples: Sequence[Sample], pad_token_id: int) -> SampleBatch:
    """Pad samples to the longest one, on the right; there are routes where every sample tells its
    own."""
    lengths = torch.tensor([sample.tokens.numel() for sample in samples])
    prompt_lengths = torch.tensor([sample.prompt_length for sample in samples])
    tokens = pad_sequence(
        [sample.tokens for sample in samples], batch_first=True, padding_value=pad_token_id
    )
    mask = response_mask(lengths, prompt_lengths, tokens.shape[1])
    logprobs, versions = torch.zeros(mask.shape), torch.zeros(mask.shape, dtype=torch.int64)
    logprobs[mask] = torch.cat([sample.engine_logprobs for sample in samples])
    versions[mask] = torch.cat([sample.weight_versions for sample in samples])
    rewards = None
    if (turns := of_responses(samples, "rewards")) is not None:
        rewards = torch.zeros(mask.shape).masked_scatter_(mask, turns)
    reasons = torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in samples])
    groups = torch.tensor([sample.prompt_id for sample in samples]).unique_consecutive(
        return_inverse=True
    )[1]
    kept, routes = kept_by(samples), None
    if kept is not None:
        counts, starts = (
            torch.zeros(mask.shape, dtype=torch.int64),
            torch.zeros(mask.shape, dtype=torch.int64),
        )
        counts[mask], starts[mask] = kept.counts, kept.starts
        kept = KeptTokens(counts, starts, kept.ids)
    if (drawn := of_responses(samples, "drawn")) is not None:
        mask = mask.masked_scatter(mask, drawn)
    told = [sample.routes for sample in samples if sample.routes is not None]
    if len(told) == len(samples):
        routes = pad_sequence(told, batch_first=True)
    own = (tokens, lengths, mask, prompt_lengths, logprobs, versions, reasons, groups)
    return SampleBatch(*own, kept=kept, routes=routes, turn_rewards=rewards)


def collate_episodes(samples: Sequence[Sample], pad_token_id: int) -> SampleBatch:
    """As `collate`, with the samples' branches as rows behind all of them."""
    of = [place for place, sample in enumerate(samples) for _ in sample.branches]
    if not of:
        return collate(samples, pad_token_id)
    batch = collate(
        [*samples, *(branch for sample in samples for branch in sample.branches)], pad_token_id
    )
    episodes = torch.tensor([*range(len(samples)), *of])
    return replace(batch, episodes=episodes, groups=batch.groups[episodes])
