"""An episode under way: what the policy has drawn and read in it, and whether another environment
repeats what it was told."""

import itertools
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


@dataclass
class OpenEpisode:
    """An episode that is not over: one sequence after another, of which the last one still
    grows."""

    name: str
    request: GenerationRequest
    begun: Sample | None
    """What the episode goes on from, until its environment has gone through all of it once more."""
    branches: list[Sample] = field(default_factory=list)
    """The sequences before the one that grows."""
    sample: Sample | None = None
    """The sequence as it was at the end of the last turn; None before its first one."""
    turn: Tensor | None = None
    """The last turn's tokens, its end among them."""
    told: int = 0
    """Response tokens up to where that turn ends, or the next one begins."""
    turns: int = 0
    conversation: Conversation | None = None
    """As it was when the policy last had to answer; None where it is no chat's."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """In this sequence, by the response token that each was given for, a turn's last one."""

    @property
    def is_replayed(self) -> bool:
        """Whether the sample that it goes on from has what the environment is about to say."""
        begun = self.begun
        return begun is not None and (
            len(self.branches) < len(begun.branches) or self.told < len(begun.response)
        )

    def worded(self, messages: Messages, chat: ChatTurns) -> list[int] | NewBranch:
        """The tokens of messages that came behind the last turn, or why they cannot be appended to
        it.

        Raises AlignerError where the prompt is none of messages, and where no message can stand
        behind the turn.
        """
        assert self.turn is not None
        if self.conversation is None:
            asked = self.request.prompt.metadata
            self.conversation = chat.begin(
                asked.get("messages", ()), asked.get("tools"), asked.get("chat_template_kwargs")
            )
            if not torch.equal(self.conversation.tokens, self.request.prompt.tokens):
                raise AlignerError(
                    "the environment returned chat messages, but the prompt is plain text; the"
                    " prompt must consist of chat messages"
                )
        begun = len(self.conversation.tokens) + len(self.turn)
        found = chat.append_turn(self.conversation, self.turn, messages)
        if isinstance(found, NewBranch):
            return found
        self.conversation = found
        return found.tokens[begun:].tolist()

    def act(self, sample: Sample) -> Tensor:
        """The sequence has had a further turn, whose tokens are returned."""
        self.turn = sample.response[self.told :]
        self.sample, self.turns, self.told = sample, self.turns + 1, len(sample.response)
        return self.turn

    def hear(self, found: list[int] | NewBranch) -> None:
        """The policy is told these tokens, or reads the whole conversation anew in a branch."""
        if isinstance(found, NewBranch):
            self.branches.append(self.complete("stop", branches=()))
            self.sample, self.told, self.rewards, self.conversation = (
                None,
                0,
                [],
                found.conversation,
            )
        else:
            self.told += len(found)

    def complete(self, reason: FinishReason, branches: tuple[Sample, ...] | None = None) -> Sample:
        """The sequence up to its last turn, with these branches or all."""
        assert self.sample is not None
        return self._told(replace(self.sample, finish_reason=reason), branches)

    @property
    def begun_sequence(self) -> Sample:
        """The sequence that grows, as far as the continued sample contains it."""
        assert self.begun is not None
        return replace(self.begun.sequences[len(self.branches)], branches=(), rewards=None)

    def unfinished(self) -> Sample:
        """Return the episode as it is, for a later step to continue."""
        if self.begun is not None:
            return self.begun
        sample = self.sample or unfinished_sample(replace(self.request, begun=None))
        return self._told(replace(sample, finish_reason="unfinished"), None)

    def repeats(self, found: list[int] | NewBranch) -> bool:
        """Whether the sample that it goes on from has the same there, and the same rewards
        before."""
        assert self.begun is not None
        begun, *following = self.begun.sequences[len(self.branches) :]
        had = torch.zeros(len(begun.response)) if begun.rewards is None else begun.rewards
        if not torch.equal(had[: self.told], self._rewards(self.told)):
            return False
        is_at_end = self.told == len(begun.response)
        if isinstance(found, NewBranch):
            following = following if is_at_end else []
            return any(
                torch.equal(found.conversation.tokens, each.tokens[: each.prompt_length])
                for each in following[:1]
            )
        given = itertools.takewhile(
            lambda at: not is_drawn(begun, at), range(self.told, len(begun.response))
        )
        return (
            not is_at_end
            and found == begun.response[self.told : self.told + len([*given])].tolist()
        )

    def next_turn(self, ends: Collection[int]) -> Sample | None:
        """The sequence up to the end of the turn that follows in the sample that it goes on from;
        None where that has no end.

        `ends` are the tokens that end a turn.
        """
        assert self.begun is not None
        begun, *following = self.begun.sequences[len(self.branches) :]
        last = len(begun.response) if following else None
        places = range(self.told, len(begun.response))
        ended = next(
            (at + 1 for at in places if int(begun.response[at]) in ends and is_drawn(begun, at)),
            last,
        )
        if ended is None:
            return None
        return replace(begun.truncate(ended, "stop"), branches=(), rewards=None)

    def _told(self, sample: Sample, branches: tuple[Sample, ...] | None) -> Sample:
        """The sample with what the environment has given, and with these branches or all."""
        rewards = self._rewards(len(sample.response))
        return replace(
            sample, rewards=rewards, branches=tuple(self.branches) if branches is None else branches
        )

    def _rewards(self, tokens: int) -> Tensor:
        """What the environment has given for the sequence, float32 [tokens]."""
        rewards = torch.zeros(tokens)
        for token, reward in self.rewards:
            rewards[token] += reward
        return rewards


def branch_prompt(request: GenerationRequest, read: Tensor, options: SamplingOptions) -> Sample:
    """Return the empty sample of a branch of an episode, which reads `read`, int64 [T].

    A branch has room for input and response within the tokens that the episode's prompt and
    response may have together. Raises AlignerError if that leaves no room.
    """
    most = len(request.prompt.tokens) + request.limit(options)
    if most - len(read) < max(1, options.min_new_tokens):
        raise AlignerError(
            f"the re-rendered conversation has {len(read)} tokens and leaves no room"
            f" for a response; prompt and response together must have at most {most} tokens"
        )
    prompt = replace(request.prompt, text="", tokens=read)
    return unfinished_sample(GenerationRequest(prompt, request.sample_index))


def is_drawn(sample: Sample, at: int) -> bool:
    """Whether the model drew a response token."""
    return sample.drawn is None or bool(sample.drawn[at])


_log = logging.getLogger(__name__)

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
        turn_end = self.tokenizer.get_single_token(self.settings.turn_end, "environment.turn_end")
        if turn_end is not None:
            options = replace(options, stop_token_ids=(*options.stop_token_ids, turn_end))
        self.engine.check([replace(request, begun=None) for request in requests], options)
        loop = EngineLoop(
            self.engine,
            steps_per_answer=_STEPS_PER_ANSWER if self.by_steps else None,
            listener=self.environments.listener,
        )
        if requests:
            longest = max(len(each.prompt.tokens) + each.limit(options) for each in requests)
            self.engine.reserve(len(requests), longest)
        numbers = Counter[tuple[int, int]]()
        for index, request in enumerate(requests):
            sample = (request.prompt.id, request.sample_index)
            numbers[sample] += 1
            name = episode_name(*sample, numbers[sample])
            episode = OpenEpisode(name, request, request.begun)
            loop.spawn(index, _EpisodeRun(self, loop, index, episode, options).run())
        return loop


class _EpisodeRun:
    """The coroutine of one episode.

    An episode ends when its environment says so; it is truncated when a turn, the response or the
    number of turns reaches its limit. If messages cannot be appended safely to the generated
    tokens, the whole conversation is rendered again, and a new branch continues from there; if that
    does not fit, the episode is truncated. An episode whose environment fails for good has the
    reward NaN, and is not scored.

    An episode that was begun elsewhere is replayed first: its environment receives the same
    actions, and has to return the observations that the sample contains; else the episode is lost.
    """

    def __init__(
        self,
        source: EnvironmentEpisodes,
        loop: EngineLoop,
        index: int,
        episode: OpenEpisode,
        options: SamplingOptions,
    ) -> None:
        self._source = source
        self._loop = loop
        self._index = index
        self._episode = episode
        self._options = options
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
        episode = self._episode
        while True:
            outcome: Outcome = await self._loop.answer(
                answer, self._index, is_replayed=episode.is_replayed
            )
            if episode.turn is not None:
                episode.rewards.append((episode.told - 1, outcome.reward))

            if episode.is_replayed:
                sequence = self._replay(outcome)
            else:
                episode.begun = None
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
                episode.begun = None
                if sequence.finish_reason == "unfinished":
                    episode.sample = sequence
                    return episode.unfinished()

            turn = episode.act(sequence)
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
            self._source.engine.release(request.prompt.id, request.sample_index)
            self._log_branch(observation)
        else:
            current = episode.sample or unfinished_sample(replace(episode.request, begun=None))
            limit = self._limit(current)
            sequence = with_observation(current, observation, limit)
        episode.hear(observation)
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
        if self._is_over(outcome) or not episode.repeats(observation):
            raise EpisodeLost(
                f"episode {episode.name} cannot be resumed: on replay, its environment"
                f" returned a different answer after {episode.turns} turns: {outcome}. The answers"
                " of an environment must depend only on task, seed and actions"
            )
        episode.hear(observation)
        return episode.next_turn(self._ends) or episode.begun_sequence

    async def _generate(self, sequence: Sample) -> Sample:
        """Generate a turn."""
        episode = self._episode
        used = len(sequence.response)
        turn_limit = min(
            self._limit(sequence), episode.told + self._source.settings.max_turn_tokens
        )
        sampling = replace(
            self._options,
            max_new_tokens=turn_limit - used,
            min_new_tokens=min(max(0, self._options.min_new_tokens - used), turn_limit - used),
        )
        request = episode.request
        key = RequestKey(request.prompt.id, request.sample_index, sequence.prompt_length)
        if episode.branches:
            # no two sequences of an episode may use the same random numbers, also if they read the
            # same tokens
            repeats = 0 if episode.told else len(episode.branches)
            key = replace(key, stream_start=sequence.prompt_length + episode.told, repeats=repeats)
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
        """Return the text of a turn, int64 [R], for the environment."""
        tokenizer = self._source.tokenizer
        text_tokens = turn[:-1] if int(turn[-1]) in tokenizer.eos_token_ids else turn
        # some models mark tool calls by special tokens
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
        """Return the tokens of an observation, or why messages cannot be appended to the generated
        tokens. Raises AlignerError."""
        episode = self._episode
        if isinstance(observation, str):
            prompt = episode.request.prompt
            before = prompt.tokens if episode.sample is None else episode.sample.tokens
            return self._source.tokenizer.encode_observation(before, observation).tolist()
        if episode.turn is not None:
            return episode.worded(observation, self._source.chat)
        if observation:
            raise AlignerError(
                f"reset returned {len(observation)} chat messages; the first messages come from the"
                " data, so reset must return a string or an empty list"
            )
        return []

    def _log_branch(self, observation: NewBranch) -> None:
        logged = self._source.logged
        if "branch" not in logged:
            logged.add("branch")
            _log.info(
                "episode %s starts a new branch (logged for the first episode only): %s",
                self._episode.name,
                observation.reason,
            )


def task_of(prompt: Prompt, tokenizer: Tokenizer, seed: int) -> tuple[dict[str, Any], int]:
    """What an episode is about, JSON, and its seed in a run of this one; a prompt's samples have
    both alike."""
    return {
        **prompt.metadata,
        "prompt": tokenizer.decode(prompt.tokens),
    }, seed * 1_000_003 + prompt.id


def lost_sample(request: GenerationRequest, filler: int) -> Sample:
    """A sample of one token, `filler`, that stands for an episode that was lost: its reward is not
    a number."""
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
