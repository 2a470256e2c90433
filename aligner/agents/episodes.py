"""Episodes: responses of several turns, with the observations of an environment between them.

`EnvironmentEpisodes` starts one coroutine per episode, and `EpisodeState` is the state of an
episode: its sequences, turns and rewards. An episode can continue a partial rollout; its
environment is then replayed, and must return the observations that the partial rollout contains.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_environment import EpisodeLost, Observation, Outcome
from aligner.data.chat_turns import ChatTurns, Conversation, NewBranch
from aligner.data.tokenizer import Messages, Tokenizer
from aligner.data.types import FinishReason, Prompt, Sample
from aligner.engines.engine_loop import (
    EngineLoop,
    Interrupted,
    SamplesInFlight,
    reserve_longest,
    start_on_replica,
    unfinished_sample,
    with_completion,
    with_observation,
)
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
)
from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)


@dataclass
class EpisodeState:
    """The state of an episode that is in progress: its sequences, of which the last one grows."""

    name: str
    request: GenerationRequest
    partial: Sample | None
    """The partial rollout that the episode continues; None after the replay has reached its end."""
    branches: list[Sample] = field(default_factory=list)
    """The earlier sequences of the episode."""
    sample: Sample | None = None
    """The current sequence at the end of its last turn; None before the first turn."""
    turn: Tensor | None = None
    """int64 [R]: the tokens of the last turn, including its end."""
    position: int = 0
    """Number of response tokens of the current sequence up to the end of the last turn; with the
    next observation, up to the start of the next turn."""
    turns: int = 0
    """Number of turns in all sequences."""
    conversation: Conversation | None = None
    """The chat messages before the last turn; None without messages."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewards of the current sequence: the index of the turn's last response token, the reward."""

    @property
    def is_replayed(self) -> bool:
        """Whether the partial rollout contains the environment's next observation."""
        partial = self.partial
        return partial is not None and (
            len(self.branches) < len(partial.branches) or self.position < len(partial.response)
        )

    def render_messages(self, messages: Messages, chat: ChatTurns) -> list[int] | NewBranch:
        """Return the tokens of an observation's chat messages.

        Returns a `NewBranch` if the messages cannot be appended to the generated tokens.

        Raises:
            AlignerError: The prompt does not consist of messages, or the chat template accepts no
                message after the last turn.
        """
        assert self.turn is not None
        if self.conversation is None:
            metadata = self.request.prompt.metadata
            self.conversation = chat.begin(
                metadata.get("messages", ()),
                metadata.get("tools"),
                metadata.get("chat_template_kwargs"),
            )
            if not torch.equal(self.conversation.tokens, self.request.prompt.tokens):
                raise AlignerError(
                    "the environment returned chat messages, but the prompt is plain text; the"
                    " prompt must consist of chat messages"
                )
        length = len(self.conversation.tokens) + len(self.turn)
        conversation = chat.append_turn(self.conversation, self.turn, messages)
        if isinstance(conversation, NewBranch):
            return conversation
        self.conversation = conversation
        return conversation.tokens[length:].tolist()

    def append_turn(self, sample: Sample) -> Tensor:
        """Replace the current sequence by `sample`, which has one more turn; return its tokens."""
        self.turn = sample.response[self.position :]
        self.sample = sample
        self.turns += 1
        self.position = len(sample.response)
        return self.turn

    def append_observation(self, observation: list[int] | NewBranch) -> None:
        """Move behind the observation's tokens, or start the sequence of a new branch."""
        if isinstance(observation, NewBranch):
            self.branches.append(self.complete("stop", branches=()))
            self.sample = None
            self.position = 0
            self.rewards = []
            self.conversation = observation.conversation
        else:
            self.position += len(observation)

    def complete(self, reason: FinishReason, branches: tuple[Sample, ...] | None = None) -> Sample:
        """Return the current sequence as a sample; `branches=None` adds all earlier sequences."""
        assert self.sample is not None
        return self._add_rewards(replace(self.sample, finish_reason=reason), branches)

    @property
    def partial_sequence(self) -> Sample:
        """The current sequence as far as the partial rollout contains it."""
        assert self.partial is not None
        return replace(self.partial.sequences[len(self.branches)], branches=(), rewards=None)

    def unfinished(self) -> Sample:
        """Return the episode as a partial rollout, which a later step can continue."""
        if self.partial is not None:
            return self.partial
        sample = self.sample or unfinished_sample(replace(self.request, begun=None))
        return self._add_rewards(replace(sample, finish_reason="unfinished"), None)

    def matches_replay(self, observation: list[int] | NewBranch) -> bool:
        """Return whether the partial rollout continues with this observation.

        The environment's rewards before the observation must be equal too.
        """
        assert self.partial is not None
        sequence, *later = self.partial.sequences[len(self.branches) :]
        rewards = sequence.rewards
        if rewards is None:
            rewards = torch.zeros(len(sequence.response))
        if not torch.equal(rewards[: self.position], self._sum_rewards(self.position)):
            return False

        is_at_end = self.position == len(sequence.response)
        if isinstance(observation, NewBranch):
            if not is_at_end or not later:
                return False
            prompt = later[0].tokens[: later[0].prompt_length]
            return torch.equal(observation.conversation.tokens, prompt)

        # observation tokens follow until the model generated a token again
        end = self.position
        while end < len(sequence.response) and not is_generated(sequence, end):
            end += 1
        return not is_at_end and observation == sequence.response[self.position : end].tolist()

    def next_turn(self, stop_token_ids: Collection[int]) -> Sample | None:
        """Return the partial rollout's sequence up to the end of its next turn.

        Returns None if the turn has no end there, because generation was interrupted.
        """
        assert self.partial is not None
        sequence, *later = self.partial.sequences[len(self.branches) :]
        length = len(sequence.response)
        for index in range(self.position, length):
            token = int(sequence.response[index])
            if token in stop_token_ids and is_generated(sequence, index):
                length = index + 1
                break
        else:
            if not later:
                return None
        return replace(sequence.truncate(length, "stop"), branches=(), rewards=None)

    def _add_rewards(self, sample: Sample, branches: tuple[Sample, ...] | None) -> Sample:
        """Return the sample with the environment's rewards; see `complete` for `branches`."""
        rewards = self._sum_rewards(len(sample.response))
        if branches is None:
            branches = tuple(self.branches)
        return replace(sample, rewards=rewards, branches=branches)

    def _sum_rewards(self, tokens: int) -> Tensor:
        """Return the environment's rewards of the current sequence, float32 [tokens]."""
        rewards = torch.zeros(tokens)
        for index, reward in self.rewards:
            rewards[index] += reward
        return rewards


def branch_prompt(request: GenerationRequest, read: Tensor, options: SamplingOptions) -> Sample:
    """Return the empty sample of a branch of an episode, whose prompt is `read`, int64 [T].

    The prompt and the response of a branch together may have as many tokens as the prompt and the
    response of the episode. Raises AlignerError if that leaves no room for a response.
    """
    limit = len(request.prompt.tokens) + request.limit(options)
    if limit - len(read) < max(1, options.min_new_tokens):
        raise AlignerError(
            f"the re-rendered conversation has {len(read)} tokens and leaves no room"
            f" for a response; prompt and response together must have at most {limit} tokens"
        )
    prompt = replace(request.prompt, text="", tokens=read)
    return unfinished_sample(GenerationRequest(prompt, request.sample_index))


def is_generated(sample: Sample, index: int) -> bool:
    """Return whether the model generated a response token, in contrast to an observation."""
    return sample.drawn is None or bool(sample.drawn[index])


_STEPS_PER_ANSWER = 4
"""Engine steps after which an answer is delivered if answers are delivered by steps."""


def episode_name(prompt_id: int, sample_index: int, number: int = 1) -> str:
    """Return the name by which environments know an episode.

    `number` distinguishes episodes of the same sample; it is 1 for the first.
    """
    return f"{prompt_id}/{sample_index}" if number == 1 else f"{prompt_id}/{sample_index}/{number}"


@dataclass(frozen=True)
class EnvironmentEpisodes:
    """Starts episodes in the environments of this process (`SampleSource`)."""

    engine: GenerationEngine
    environments: EnvironmentPool
    tokenizer: Tokenizer
    settings: EnvironmentConfig
    seed: int
    by_steps: bool = False
    """Deliver answers a fixed number of engine steps after the request, so that the set of complete
    episodes does not depend on how fast environments are."""
    logged: set[str] = field(default_factory=set)
    """Messages that are logged only once."""

    @cached_property
    def chat(self) -> ChatTurns:
        """The chat template. Raises ConfigError for a model without one."""
        return ChatTurns.for_tokenizer(self.tokenizer)

    def forget(self, first: int) -> None:
        """See `SampleSource.forget`."""
        self.environments.forget(lambda name: int(name.partition("/")[0]) < first)

    def take_waits(self) -> float | None:
        """See `SampleSource.take_waits`."""
        return self.environments.take_waits()

    def close(self) -> None:
        """Stop the environments."""
        self.environments.close()

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> SamplesInFlight:
        """Start one episode per request, or continue the one that the request has begun."""
        return start_on_replica(self.engine, requests, lambda: self._start(requests, options))

    def _start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> EngineLoop:
        """Return a loop with one coroutine per episode."""
        turn_end = self.tokenizer.get_single_token(self.settings.turn_end, "environment.turn_end")
        if turn_end is not None:
            options = replace(options, stop_token_ids=(*options.stop_token_ids, turn_end))
        self.engine.check([replace(request, begun=None) for request in requests], options)
        reserve_longest(self.engine, requests, options)
        loop = EngineLoop(
            self.engine,
            steps_per_answer=_STEPS_PER_ANSWER if self.by_steps else None,
            listener=self.environments.listener,
        )
        numbers = Counter[tuple[int, int]]()
        for index, request in enumerate(requests):
            sample = (request.prompt.id, request.sample_index)
            numbers[sample] += 1
            name = episode_name(*sample, numbers[sample])
            episode = EpisodeState(name, request, request.begun)
            loop.spawn(index, _EpisodeRun(self, loop, index, episode, options).run())
        return loop


class _EpisodeRun:
    """The coroutine of one episode.

    An episode ends when its environment says so; it is truncated when a turn, the response or the
    number of turns reaches its limit. If messages cannot be appended safely to the generated
    tokens, the whole conversation is rendered again, and a new branch continues from there; if that
    does not fit, the episode is truncated. An episode whose environment fails after all retries
    has the reward NaN, and is not scored.

    An episode that continues a partial rollout is replayed first: its environment receives the same
    actions, and has to return the observations that the sample contains; else the episode is lost.
    """

    def __init__(
        self,
        source: EnvironmentEpisodes,
        loop: EngineLoop,
        index: int,
        episode: EpisodeState,
        options: SamplingOptions,
    ) -> None:
        self._source = source
        self._loop = loop
        self._index = index
        self._episode = episode
        self._options = options
        # tokens that end a turn
        self._ends = frozenset(options.stop_token_ids)

    async def run(self) -> Sample:
        """Return the sample of the episode: complete, lost, or unfinished if it is interrupted."""
        episode = self._episode
        source = self._source
        prompt = episode.request.prompt
        task, seed = task_of(prompt, source.tokenizer, source.seed)
        outcome = source.environments.reset(episode.name, task, seed)
        try:
            return await self._play(outcome)
        except Interrupted:
            return episode.unfinished()
        except EpisodeLost as error:
            _log.warning("%s", error)
            return lost_sample(episode.request, source.tokenizer.pad_token_id)
        finally:
            source.environments.finish(episode.name)
            source.engine.release(prompt.id, episode.request.sample_index)

    async def _play(self, answer: Any) -> Sample:
        """Alternate between observations and turns until the episode ends.

        Args:
            answer: Future of the environment's first observation.

        Raises:
            EpisodeLost: The environment failed for good, or returned other answers on replay.
            Interrupted: The loop stopped while the episode waited for its environment.
        """
        episode = self._episode
        while True:
            outcome: Outcome = await self._loop.answer(
                answer, self._index, is_replayed=episode.is_replayed
            )
            # the answer to a reset, which comes before the first turn, has no reward
            if episode.turn is not None:
                episode.rewards.append((episode.position - 1, outcome.reward))

            if episode.is_replayed:
                sequence = self._replay(outcome)
            else:
                # the replay has reached its end: from here on the episode is new
                episode.partial = None
                if self._is_over(outcome):
                    return episode.complete("stop" if outcome.done else "length")
                try:
                    sequence = self._continue(outcome)
                except AlignerError as error:
                    _log.info("episode %s ended early: %s", episode.name, error)
                    if episode.sample is None:
                        return lost_sample(episode.request, self._source.tokenizer.pad_token_id)
                    return episode.complete("length")

            if sequence.finish_reason == "unfinished":
                sequence = await self._generate(sequence)
                episode.partial = None
                if sequence.finish_reason == "unfinished":
                    episode.sample = sequence
                    return episode.unfinished()

            turn = episode.append_turn(sequence)
            if sequence.finish_reason == "length":
                return episode.complete("length")
            answer = self._source.environments.step(episode.name, self._action(sequence, turn))

    def _continue(self, outcome: Outcome) -> Sample:
        """Return the sequence with the environment's observation, or the start of a new branch.

        Raises AlignerError if that leaves no room for a generated token.
        """
        episode = self._episode
        observation = self._observation(outcome.observation)
        if isinstance(observation, NewBranch):
            request = episode.request
            self._source.engine.check_branch(request.prompt.id)
            sequence = branch_prompt(request, observation.conversation.tokens, self._options)
            # the branch does not continue the tokens in the KV cache
            self._source.engine.release(request.prompt.id, request.sample_index)
            self._log_branch(observation)
        else:
            current = episode.sample or unfinished_sample(replace(episode.request, begun=None))
            limit = self._limit(current)
            sequence = with_observation(current, observation, limit)
        episode.append_observation(observation)
        return sequence

    def _replay(self, outcome: Outcome) -> Sample:
        """Return the next turn of the sample that the episode continues; unfinished if the turn has
        no end yet.

        Raises EpisodeLost if the environment did not return what the sample contains.
        """
        episode = self._episode
        try:
            observation = self._observation(outcome.observation)
        except AlignerError as error:
            raise EpisodeLost(f"episode {episode.name} cannot be resumed: {error}") from error
        if self._is_over(outcome) or not episode.matches_replay(observation):
            raise EpisodeLost(
                f"episode {episode.name} cannot be resumed: on replay, its environment"
                f" returned a different answer after {episode.turns} turns: {outcome}. The answers"
                " of an environment must depend only on task, seed and actions"
            )
        episode.append_observation(observation)
        return episode.next_turn(self._ends) or episode.partial_sequence

    async def _generate(self, sequence: Sample) -> Sample:
        """Generate a turn."""
        episode = self._episode
        used = len(sequence.response)
        turn_limit = min(
            self._limit(sequence), episode.position + self._source.settings.max_turn_tokens
        )
        sampling = replace(
            self._options,
            max_new_tokens=turn_limit - used,
            min_new_tokens=min(max(0, self._options.min_new_tokens - used), turn_limit - used),
        )
        request = episode.request
        key = RequestKey(request.prompt.id, request.sample_index, sequence.prompt_length)
        if episode.branches:
            # Two sequences of an episode must not use the same random numbers, even if they read
            # the same tokens.
            repeats = 0 if episode.position else len(episode.branches)
            key = replace(
                key, stream_start=sequence.prompt_length + episode.position, repeats=repeats
            )
        completion = await self._loop.generate(
            sequence.tokens, sampling, key=key, is_continued=True
        )
        return with_completion(sequence, completion)

    def _limit(self, sequence: Sample) -> int:
        """Return the maximum number of response tokens of a sequence of the episode."""
        request = self._episode.request
        limit = request.limit(self._options)
        return min(limit, len(request.prompt.tokens) + limit - sequence.prompt_length)

    def _action(self, sequence: Sample, turn: torch.Tensor) -> str:
        """Return the text of the turn's tokens, int64 [R], for the environment.

        The text contains no end-of-sequence token.
        """
        tokenizer = self._source.tokenizer
        text_tokens = turn[:-1] if int(turn[-1]) in tokenizer.eos_token_ids else turn
        # some models mark tool calls with special tokens, which the tool parser needs
        return tokenizer.decode_after(
            sequence.tokens[: len(sequence.tokens) - len(turn)],
            text_tokens,
            skip_special_tokens=not self._source.settings.has_tools,
        )

    def _is_over(self, outcome: Outcome) -> bool:
        """Return whether no turn follows an answer."""
        episode = self._episode
        return episode.turn is not None and (
            outcome.done or episode.turns == self._source.settings.max_turns
        )

    def _observation(self, observation: Observation) -> list[int] | NewBranch:
        """Return the tokens of an observation.

        Returns a `NewBranch` if messages cannot be appended to the generated tokens. Raises
        AlignerError if the episode cannot contain the observation.
        """
        episode = self._episode
        if isinstance(observation, str):
            prompt = episode.request.prompt
            preceding_tokens = prompt.tokens if episode.sample is None else episode.sample.tokens
            return self._source.tokenizer.encode_observation(preceding_tokens, observation).tolist()
        if episode.turn is not None:
            return episode.render_messages(observation, self._source.chat)
        if observation:
            raise AlignerError(
                f"reset returned {len(observation)} chat messages; the first messages come from the"
                " data, so reset must return a string or an empty list"
            )
        return []

    def _log_branch(self, observation: NewBranch) -> None:
        """Log the first new branch of all episodes."""
        logged = self._source.logged
        if "branch" not in logged:
            logged.add("branch")
            _log.info(
                "episode %s starts a new branch (logged for the first episode only): %s",
                self._episode.name,
                observation.reason,
            )


def task_of(prompt: Prompt, tokenizer: Tokenizer, seed: int) -> tuple[dict[str, Any], int]:
    """Return the task of an episode, as JSON values, and its seed in a run with this seed.

    All samples of a prompt have the same task and the same seed.
    """
    return {
        **prompt.metadata,
        "prompt": tokenizer.decode(prompt.tokens),
    }, seed * 1_000_003 + prompt.id


def lost_sample(request: GenerationRequest, filler: int) -> Sample:
    """Return the sample of a lost episode: the response is the token `filler`, the reward NaN."""
    prompt = request.prompt
    return Sample(
        prompt_id=prompt.id,
        sample_index=request.sample_index,
        tokens=torch.cat((prompt.tokens.cpu(), torch.tensor([filler]))),
        prompt_length=len(prompt.tokens),
        engine_logprobs=torch.zeros(1),
        weight_versions=torch.zeros(1, dtype=torch.int64),
        finish_reason="length",
        metadata=prompt.metadata,
        rewards=torch.full((1,), torch.nan),
    )
