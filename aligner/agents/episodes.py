"""Episodes: responses of several turns, with the observations of an environment between them.

`EnvironmentEpisodes` starts one coroutine per episode, and `EpisodeState` is the state of an
episode: its sequences, turns and rewards. An episode can continue a partial sample; its
environment is then replayed, and must return the observations that the sample contains.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_environment import EpisodeLost, Observation, Outcome
from aligner.data.chat_turns import ChatTurns, Conversation, NewBranch
from aligner.data.episode_reports import EpisodeReport, FailureKind
from aligner.data.stop_strings import StopSearch
from aligner.data.tokenizer import Messages, Tokenizer
from aligner.data.types import FinishReason, Prompt, Sample
from aligner.engines.engine_loop import (
    CreateSample,
    EngineLoop,
    Interrupted,
    SamplesInFlight,
    append_completion,
    append_observation,
    create_unfinished_sample,
    reserve_cache,
    start_on_replica,
)
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
)
from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig
from aligner.user_code import report_skipped_prompt

_log = logging.getLogger(__name__)


@dataclass
class EpisodeState:
    """The state of an episode that is in progress: its sequences, of which the last one grows."""

    name: str
    request: GenerationRequest
    partial_sample: Sample | None
    """The partial sample that the episode continues; None for a new episode, and after the end of
    the replay."""
    branches: list[Sample] = field(default_factory=list)
    """The earlier sequences of the episode."""
    sample: Sample | None = None
    """The current sequence at the end of its last turn; None before the first turn."""
    last_turn: Tensor | None = None
    """Tokens of the last turn, including its end, int64 [R]; None before the first turn."""
    position: int = 0
    """Number of response tokens of the current sequence before its next turn. `append_turn`
    advances it past a turn, `advance_past_observation` past the observation after the turn."""
    turn_count: int = 0
    """Number of turns in all sequences."""
    conversation: Conversation | None = None
    """The chat messages before the last turn; None without messages."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewards of the current sequence, one per answered turn: the response index of the turn's last
    token, and the reward."""
    failure: FailureKind | None = None
    """Failure of the environment that has ended the episode; None if there was none."""

    @property
    def is_replayed(self) -> bool:
        """Whether the partial sample contains the environment's next observation."""
        partial_sample = self.partial_sample
        return partial_sample is not None and (
            len(self.branches) < len(partial_sample.branches)
            or self.position < len(partial_sample.response)
        )

    def render_messages(self, messages: Messages, chat: ChatTurns) -> list[int] | NewBranch:
        """Return the tokens of an observation's chat messages.

        Returns a `NewBranch` if the messages cannot be appended to the generated tokens.

        Raises:
            AlignerError: The prompt does not consist of messages, or the chat template accepts no
                message after the last turn.
        """
        assert self.last_turn is not None
        if self.conversation is None:
            metadata = self.request.prompt.metadata
            self.conversation = chat.begin(
                metadata.get("messages", ()),
                metadata.get("tools"),
                metadata.get("chat_template_kwargs"),
            )
            # messages can be appended only to a prompt that the chat template has rendered
            if not torch.equal(self.conversation.tokens, self.request.prompt.tokens):
                raise AlignerError(
                    "the environment returned chat messages, but the prompt is plain text; the"
                    " prompt must consist of chat messages"
                )

        context_length = len(self.conversation.tokens) + len(self.last_turn)
        conversation = chat.append_turn(self.conversation, self.last_turn, messages)
        if isinstance(conversation, NewBranch):
            return conversation
        self.conversation = conversation
        return conversation.tokens[context_length:].tolist()

    def append_turn(self, sample: Sample) -> Tensor:
        """Replace the current sequence by `sample`, which has one more turn.

        Returns the tokens of that turn, int64 [R].
        """
        self.last_turn = sample.response[self.position :]
        self.sample = sample
        self.turn_count += 1
        self.position = len(sample.response)
        return self.last_turn

    def advance_past_observation(self, observation: list[int] | NewBranch) -> None:
        """Advance `position` past the observation, or begin a new branch.

        A new branch moves the current sequence to `branches`.
        """
        if isinstance(observation, NewBranch):
            self.branches.append(self.to_sample("stop", branches=()))
            self.sample = None
            self.position = 0
            self.rewards = []
            self.conversation = observation.conversation
        else:
            self.position += len(observation)

    def to_sample(
        self, finish_reason: FinishReason, branches: tuple[Sample, ...] | None = None
    ) -> Sample:
        """Return the current sequence as a sample; `branches=None` adds all earlier sequences."""
        assert self.sample is not None
        return self._with_rewards(replace(self.sample, finish_reason=finish_reason), branches)

    @property
    def partial_sequence(self) -> Sample:
        """The partial sample's version of the current sequence."""
        assert self.partial_sample is not None
        return replace(self.partial_sample.sequences[len(self.branches)], branches=(), rewards=None)

    def to_partial_sample(self) -> Sample:
        """Return the episode as a partial sample, which a later step can continue."""
        # The replay was interrupted before its end, so the episode has no new tokens.
        if self.partial_sample is not None:
            return self.partial_sample
        # without `partial_sample` the function returns a sample that has no response yet
        sample = self.sample or create_unfinished_sample(replace(self.request, partial_sample=None))
        return self._with_rewards(replace(sample, finish_reason="unfinished"), None)

    def matches_replay(self, observation: list[int] | NewBranch) -> bool:
        """Return whether the partial sample continues with this observation.

        The environment's rewards before the observation must be equal too.
        """
        assert self.partial_sample is not None
        sequence, *later_sequences = self.partial_sample.sequences[len(self.branches) :]
        expected_rewards = sequence.rewards
        if expected_rewards is None:
            expected_rewards = torch.zeros(len(sequence.response))
        rewards = self._sum_rewards(self.position)
        if not torch.equal(expected_rewards[: self.position], rewards):
            return False

        is_at_end = self.position == len(sequence.response)
        if isinstance(observation, NewBranch):
            if not is_at_end or not later_sequences:
                return False
            next_sequence = later_sequences[0]
            prompt = next_sequence.tokens[: next_sequence.prompt_length]
            return torch.equal(observation.conversation.tokens, prompt)

        # the observation extends to the next token that the model generated
        end = self.position
        while end < len(sequence.response) and not is_generated(sequence, end):
            end += 1
        return not is_at_end and observation == sequence.response[self.position : end].tolist()

    def get_sequence_through_next_turn(
        self, stop_token_ids: Collection[int], stop_search: StopSearch | None
    ) -> Sample | None:
        """Return the partial sample's sequence up to the end of its next turn.

        Returns None if the next turn is incomplete, because generation was interrupted.

        Args:
            stop_token_ids: Tokens that end a turn.
            stop_search: Search for the strings that end this turn; None if there are none.
        """
        assert self.partial_sample is not None
        sequence, *later_sequences = self.partial_sample.sequences[len(self.branches) :]
        end = len(sequence.response)
        for index in range(self.position, end):
            # only generated tokens end a turn; an observation may contain the same tokens
            if not is_generated(sequence, index):
                continue
            token = int(sequence.response[index])
            if token in stop_token_ids or (
                stop_search is not None and stop_search.find_end([token]) is not None
            ):
                end = index + 1
                break
        else:
            # the turn extends to the end of the sequence; it is complete if a branch follows
            if not later_sequences:
                return None
        return replace(sequence.truncate(end, "stop"), branches=(), rewards=None)

    def _with_rewards(self, sample: Sample, branches: tuple[Sample, ...] | None) -> Sample:
        """Return the sample with the environment's rewards; see `to_sample` for `branches`."""
        rewards = self._sum_rewards(len(sample.response))
        if branches is None:
            branches = tuple(self.branches)
        return replace(sample, rewards=rewards, branches=branches)

    def _sum_rewards(self, length: int) -> Tensor:
        """Return the environment's rewards of the current sequence, float32 [length]."""
        rewards = torch.zeros(length)
        for index, reward in self.rewards:
            rewards[index] += reward
        return rewards


def create_branch(
    request: GenerationRequest, input_tokens: Tensor, options: SamplingOptions
) -> Sample:
    """Return the sample of a new branch of an episode, which has no response yet.

    Args:
        request: The request of the episode.
        input_tokens: The prompt of the branch, int64 [T].
        options: Sampling options of the episode.

    Raises:
        AlignerError: The prompt leaves no room for a response: prompt and response of a branch
            together may have as many tokens as those of the episode.
    """
    limit = len(request.prompt.tokens) + request.get_token_limit(options)
    if limit - len(input_tokens) < max(1, options.min_new_tokens):
        raise AlignerError(
            f"the re-rendered conversation has {len(input_tokens)} tokens and leaves no room"
            f" for a response; prompt and response together must have at most {limit} tokens"
        )
    prompt = replace(request.prompt, text="", tokens=input_tokens)
    return create_unfinished_sample(GenerationRequest(prompt, request.sample_index))


def is_generated(sample: Sample, index: int) -> bool:
    """Return whether the model generated the response token at `index`; otherwise the token belongs
    to an observation."""
    return sample.generated_mask is None or bool(sample.generated_mask[index])


_STEPS_PER_ANSWER = 4
"""Engine steps between a request to an environment and the delivery of the answer, if answers are
delivered by steps."""


def build_episode_name(prompt_id: int, sample_index: int, number: int = 1) -> str:
    """Return the name that identifies an episode in the environment pool.

    `number` distinguishes episodes of the same sample; it is 1 for the first of these episodes.
    """
    return f"{prompt_id}/{sample_index}" if number == 1 else f"{prompt_id}/{sample_index}/{number}"


@dataclass(frozen=True)
class EnvironmentEpisodes:
    """Starts episodes in the environments of this process (`EpisodeSource`)."""

    engine: GenerationEngine
    environments: EnvironmentPool
    tokenizer: Tokenizer
    settings: EnvironmentConfig
    seed: int
    should_deliver_by_steps: bool = False
    """Whether answers are delivered a fixed number of engine steps after the request, so that the
    set of complete episodes does not depend on how fast environments are."""
    logged_messages: set[str] = field(default_factory=set)
    """Messages that are logged only once."""
    uses_local_state = True
    """See `SampleStarter.uses_local_state`."""

    @cached_property
    def chat(self) -> ChatTurns:
        """The chat template. Raises ConfigError for a model without one."""
        return ChatTurns.for_tokenizer(self.tokenizer)

    def drop_journal_before(self, first_prompt: int) -> None:
        """See `EpisodeSource.drop_journal_before`."""
        # the name of an episode begins with its prompt's id; see `build_episode_name`
        self.environments.forget(lambda name: int(name.partition("/")[0]) < first_prompt)

    def take_environment_wait_s(self) -> float | None:
        """See `EpisodeSource.take_environment_wait_s`."""
        return self.environments.take_environment_wait_s()

    def close(self) -> None:
        """Stop the environments."""
        self.environments.close()

    def start(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        later: Sequence[GenerationRequest] = (),
    ) -> SamplesInFlight:
        """Start one episode per request, or continue the request's partial sample."""
        return start_on_replica(
            self.engine, requests, lambda first: self._create_loop([*first, *later], options)
        )

    def _create_loop(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> tuple[EngineLoop, CreateSample]:
        """Return a loop for these requests, and a function that creates the coroutine of an
        episode."""
        turn_end = self.tokenizer.get_single_token(self.settings.turn_end, "environment.turn_end")
        if turn_end is not None:
            options = replace(options, stop_token_ids=(*options.stop_token_ids, turn_end))
        # without the partial samples: an episode that was interrupted while it waited for its
        # environment may have reached the token limit, which the check refuses
        self.engine.check([replace(request, partial_sample=None) for request in requests], options)
        reserve_cache(self.engine, requests, options)
        loop = EngineLoop(
            self.engine,
            steps_per_answer=_STEPS_PER_ANSWER if self.should_deliver_by_steps else None,
            listener=self.environments.listener,
        )

        # the same sample may be requested more than once; each episode needs a unique name
        episode_counts = Counter[tuple[int, int]]()

        def create(index: int, request: GenerationRequest) -> Coroutine[Any, Any, Sample]:
            sample_key = (request.prompt.id, request.sample_index)
            episode_counts[sample_key] += 1
            name = build_episode_name(*sample_key, episode_counts[sample_key])
            episode = EpisodeState(name, request, request.partial_sample)
            return _EpisodeRun(self, loop, index, episode, options).run()

        return loop, create


class _EpisodeRun:
    """The coroutine of one episode.

    An episode ends when its environment reports the end; it is truncated when a turn, the response
    or the number of turns reaches its limit. If messages cannot be appended safely to the generated
    tokens, the whole conversation is rendered again, and a new branch continues from there; if that
    does not fit, the episode is truncated. An episode whose environment fails after all retries
    has the reward NaN, and is not scored. With `environment.failure_reward`, the pool answers with
    the end of the episode instead if the policy may have caused the failure.

    An episode that continues a partial sample is replayed first: its environment receives the same
    actions, and must return the observations that the sample contains; otherwise the episode is
    lost.
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
        self._stop_token_ids = frozenset(options.stop_token_ids)
        """Tokens that end a turn."""

    async def run(self) -> Sample:
        """Return the sample of the episode: complete, lost, or unfinished if it is interrupted."""
        episode = self._episode
        source = self._source
        prompt = episode.request.prompt
        task, seed = build_task(prompt, source.tokenizer, source.seed)
        answer = source.environments.reset(episode.name, task, seed)
        try:
            sample = await self._play(answer)
            if sample.finish_reason == "unfinished":
                return sample
            return self._with_report(sample)
        except Interrupted:
            return episode.to_partial_sample()
        except EpisodeLost as error:
            report_lost_episode(str(error))
            has_turn = episode.last_turn is not None
            episode.failure = error.kind if has_turn else error.kind.before_first_turn()
            return self._with_report(
                build_lost_sample(episode.request, source.tokenizer.pad_token_id)
            )
        finally:
            source.environments.finish(episode.name)
            # the engine holds the KV cache of an episode between its turns
            source.engine.release(prompt.id, episode.request.sample_index)

    def _with_report(self, sample: Sample) -> Sample:
        """Return the sample of the episode, which is still open, with its report."""
        retries = self._source.environments.get_retries(self._episode.name)
        return with_report(sample, EpisodeReport(self._episode.failure, retries))

    async def _play(self, answer: Any) -> Sample:
        """Alternate between observations and turns until the episode ends.

        Args:
            answer: Future of the environment's first observation.

        Raises:
            EpisodeLost: The environment failed after all retries, returned different answers on
                replay, or left no room for the first turn.
            Interrupted: The loop stopped while the episode waited for its environment.
        """
        episode = self._episode
        while True:
            outcome: Outcome = await self._loop.wait_for_answer(
                answer, self._index, is_replayed=episode.is_replayed
            )
            # the answer to a reset, which comes before the first turn, has no reward
            if episode.last_turn is not None:
                # the turn's last token gets the reward that the environment returned
                episode.rewards.append((episode.position - 1, outcome.reward))

            if episode.is_replayed:
                sequence = self._replay(outcome)
            else:
                # the replay of the partial sample, if any, has ended; all later turns are generated
                episode.partial_sample = None
                if self._is_over(outcome):
                    episode.failure = outcome.failure
                    return episode.to_sample("stop" if outcome.done else "length")
                try:
                    sequence = self._continue(outcome)
                except AlignerError as error:
                    _log.info("episode %s ended early: %s", episode.name, error)
                    if episode.sample is None:
                        raise EpisodeLost(
                            f"episode {episode.name}: {error}", FailureKind.NO_TURN
                        ) from error
                    return episode.to_sample("length")

            # new turns and incomplete turns of the replay have to be generated
            if sequence.finish_reason == "unfinished":
                sequence = await self._generate(sequence)
                episode.partial_sample = None
                if sequence.finish_reason == "unfinished":
                    episode.sample = sequence
                    return episode.to_partial_sample()

            turn = episode.append_turn(sequence)
            if sequence.finish_reason == "length":
                return episode.to_sample("length")
            answer = self._source.environments.step(
                episode.name, self._decode_action(sequence, turn)
            )

    def _continue(self, outcome: Outcome) -> Sample:
        """Return the sequence with the environment's observation, or the prompt of a new branch.

        Raises AlignerError if the observation leaves no room for a generated token.
        """
        episode = self._episode
        observation = self._encode_observation(outcome.observation)
        if isinstance(observation, NewBranch):
            request = episode.request
            sequence = create_branch(request, observation.conversation.tokens, self._options)
            # the branch does not continue the earlier sequence, so its KV cache is not needed
            self._source.engine.release(request.prompt.id, request.sample_index)
            self._log_branch(observation)
        else:
            current_sequence = episode.sample or create_unfinished_sample(
                replace(episode.request, partial_sample=None)
            )
            limit = self._get_response_limit(current_sequence)
            sequence = append_observation(current_sequence, observation, limit)
        episode.advance_past_observation(observation)
        return sequence

    def _replay(self, outcome: Outcome) -> Sample:
        """Return the partial sample's sequence up to the end of its next turn.

        If the turn is incomplete, the sequence has the finish reason "unfinished". Raises
        EpisodeLost if the environment did not return the observation that the sample contains.
        """
        episode = self._episode
        try:
            observation = self._encode_observation(outcome.observation)
        except AlignerError as error:
            raise EpisodeLost(f"episode {episode.name} cannot be resumed: {error}") from error
        if self._is_over(outcome) or not episode.matches_replay(observation):
            raise EpisodeLost(
                f"episode {episode.name} cannot be resumed: on replay, its environment"
                f" returned a different answer after {episode.turn_count} turns: {outcome}. The"
                " answers of an environment must depend only on task, seed and actions"
            )
        episode.advance_past_observation(observation)
        partial_sequence = episode.partial_sequence
        stop_search = None
        if self._options.stop:
            search_start = self._compute_stop_search_start(partial_sequence)
            turn_start = partial_sequence.prompt_length + episode.position
            stop_search = StopSearch(
                self._source.tokenizer,
                self._options.stop,
                partial_sequence.tokens[:turn_start].tolist(),
                search_start,
            )
        return (
            episode.get_sequence_through_next_turn(self._stop_token_ids, stop_search)
            or partial_sequence
        )

    async def _generate(self, sequence: Sample) -> Sample:
        """Generate the next turn of `sequence`, or the rest of an incomplete turn, and return the
        sequence with it."""
        episode = self._episode
        response_length = len(sequence.response)
        # number of response tokens at which the turn is truncated
        turn_limit = min(
            self._get_response_limit(sequence),
            episode.position + self._source.settings.max_turn_tokens,
        )
        max_new_tokens = turn_limit - response_length
        min_new_tokens = max(0, self._options.min_new_tokens - response_length)
        sampling = replace(
            self._options,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(min_new_tokens, max_new_tokens),
        )
        request = episode.request
        key = RequestKey(request.prompt.id, request.sample_index, sequence.prompt_length)
        if episode.branches:
            # Two sequences of an episode must not use the same random numbers, even if their tokens
            # are equal. In the first turn of a branch, `repeats` counts all earlier sequences,
            # because their prompts may be the same. Later turns need no count: the tokens before
            # them contain the first turn, which was sampled with random numbers of its own.
            repeats = 0 if episode.position else len(episode.branches)
            key = replace(
                key, stream_start=sequence.prompt_length + episode.position, repeats=repeats
            )
        completion = await self._loop.generate(
            sequence.tokens,
            sampling,
            key=key,
            is_continued=True,
            stop_search_start=self._compute_stop_search_start(sequence),
        )
        return append_completion(sequence, completion)

    def _compute_stop_search_start(self, sequence: Sample) -> int:
        """Return the index of the first token of the sequence in which a stop string may begin."""
        # a stop string ends only the turn that it begins in
        return sequence.prompt_length + max(self._episode.position, self._options.min_new_tokens)

    def _get_response_limit(self, sequence: Sample) -> int:
        """Return the maximum number of response tokens of a sequence of the episode."""
        request = self._episode.request
        limit = request.get_token_limit(self._options)
        # The prompt and response of a branch together may have as many tokens as the episode's
        # prompt and response.
        return min(limit, len(request.prompt.tokens) + limit - sequence.prompt_length)

    def _decode_action(self, sequence: Sample, turn: torch.Tensor) -> str:
        """Return the text of the turn's tokens, int64 [R], for the environment.

        The text contains no end-of-sequence token.
        """
        tokenizer = self._source.tokenizer
        text_tokens = turn[:-1] if int(turn[-1]) in tokenizer.eos_token_ids else turn
        preceding_tokens = sequence.tokens[: len(sequence.tokens) - len(turn)]
        # some models mark tool calls with special tokens, which the tool parser needs
        return tokenizer.decode_after(
            preceding_tokens,
            text_tokens,
            skip_special_tokens=not self._source.settings.has_tools,
        )

    def _is_over(self, outcome: Outcome) -> bool:
        """Return whether the episode ends after this answer of its environment."""
        episode = self._episode
        return episode.last_turn is not None and (
            outcome.done or episode.turn_count == self._source.settings.max_turns
        )

    def _encode_observation(self, observation: Observation) -> list[int] | NewBranch:
        """Return the tokens of an observation.

        Returns a `NewBranch` if messages cannot be appended to the generated tokens. Raises
        AlignerError if the episode cannot contain the observation.
        """
        episode = self._episode
        if isinstance(observation, str):
            prompt = episode.request.prompt
            preceding_tokens = prompt.tokens if episode.sample is None else episode.sample.tokens
            return self._source.tokenizer.encode_observation(preceding_tokens, observation).tolist()
        if episode.last_turn is not None:
            return episode.render_messages(observation, self._source.chat)
        if observation:
            raise AlignerError(
                f"reset returned {len(observation)} chat messages; the first messages come from the"
                " data, so reset must return a string or an empty list"
            )
        return []

    def _log_branch(self, observation: NewBranch) -> None:
        """Log the first new branch of all episodes."""
        logged_messages = self._source.logged_messages
        if "branch" not in logged_messages:
            logged_messages.add("branch")
            _log.info(
                "episode %s starts a new branch (logged for the first episode only): %s",
                self._episode.name,
                observation.reason,
            )


def build_task(prompt: Prompt, tokenizer: Tokenizer, seed: int) -> tuple[dict[str, Any], int]:
    """Return the task of an episode, as JSON values, and its seed in a run with this seed.

    All samples of a prompt have the same task and the same seed.
    """
    task = {**prompt.metadata, "prompt": tokenizer.decode(prompt.tokens)}
    # runs with different seeds share no episode seed, as long as prompt ids are below a million
    episode_seed = seed * 1_000_003 + prompt.id
    return task, episode_seed


def with_report(sample: Sample, report: EpisodeReport) -> Sample:
    """Return the sample of an episode with its report, or unchanged if the report is empty."""
    return sample if report.is_empty else replace(sample, report=report)


def report_lost_episode(reason: str) -> None:
    """Report why an episode is lost, in the log and for the terminal: its prompt is skipped."""
    _log.warning("%s", reason)
    # Without the episode's name, equal reasons are shown once.
    report_skipped_prompt(re.sub(r"^episode \S+: ", "", reason))


def build_lost_sample(request: GenerationRequest, filler_token: int) -> Sample:
    """Return the sample of a lost episode, whose reward is NaN.

    A sample must have a response token, so its response is `filler_token`.
    """
    prompt = request.prompt
    return Sample(
        prompt_id=prompt.id,
        sample_index=request.sample_index,
        tokens=torch.cat((prompt.tokens.cpu(), torch.tensor([filler_token]))),
        prompt_length=len(prompt.tokens),
        engine_logprobs=torch.zeros(1),
        weight_versions=torch.zeros(1, dtype=torch.int64),
        finish_reason="length",
        metadata=prompt.metadata,
        rewards=torch.full((1,), torch.nan),
    )
