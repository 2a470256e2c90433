"""Episodes of agents that bring their own OpenAI client.

`AgentEpisodes` starts the agents of a step in worker processes, and serves their requests with the
engine. `build_episode_sample` combines the turns of an episode into token sequences: each generated
token is part of exactly one of them. `AgentJournal` records the samples of complete episodes, so
that a resumed run does not repeat them.
"""

import asyncio
import base64
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from aligner.agents.agent_endpoint import AgentServer, AgentSession, AgentTurn
from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_environment import EpisodeLost, Outcome
from aligner.agents.episode_identity import EpisodeIdentity
from aligner.agents.episode_journal import EpisodeJournal, compute_call_digest
from aligner.agents.episodes import (
    build_lost_sample,
    build_task,
    report_lost_episode,
    with_report,
)
from aligner.agents.protocols.requests import ModelRequest, build_refusal
from aligner.agents.recorded_turns import (
    RecordedTurn,
    RecordedTurns,
    build_partial_sample,
    cut_at_stop,
    has_grammar,
    join_completions,
)
from aligner.agents.request_sampling import build_sampling_options
from aligner.agents.session_context import SessionContext
from aligner.data.chat_turns import ChatTurns
from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.episode_reports import EpisodeReport, FailureKind
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Prompt, Sample
from aligner.engines.engine_loop import (
    CreateSample,
    EngineLoop,
    Interrupted,
    SamplesInFlight,
    append_completion,
    append_observation,
    create_unfinished_sample,
    start_on_replica,
)
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
)
from aligner.errors import AlignerError
from aligner.open_files import warn_if_too_few_files
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)

TurnListener = Callable[[GenerationRequest, Sequence[AgentTurn]], None]
"""Called with the request of an episode that has ended, and the turns of its agent."""


def build_episode_sample(
    request: GenerationRequest, turns: Sequence[AgentTurn], reward: float, *, is_truncated: bool
) -> Sample | None:
    """Return the sample of an episode, with all sequences except the main one as branches.

    A turn continues the turn with the longest tokens (input and generated tokens) that are a prefix
    of its own input. If several turns continue the same turn, the one that most turns follow stays
    in the sequence; each of the other turns starts a branch, whose prompt is the turn's input. The
    main sequence is the one with the most turns; of several such sequences, it is the longest. The
    result does not depend on the order of the turns.

    Args:
        request: The request of the episode.
        turns: The turns of the episode. The last token of each turn gets the turn's reward.
        reward: Reward of the whole episode, for the last token of the main sequence.
        is_truncated: Whether a limit has truncated the episode.

    Returns:
        The sample; None if there are no turns.
    """
    if not turns:
        return None
    # the tokens break ties, so that the result does not depend on the order of the turns
    sequences = sorted(
        _split_sequences(turns),
        key=lambda sequence: (
            -len(sequence),
            -len(_get_token_bytes(sequence[-1])),
            _get_token_bytes(sequence[-1]),
            [turn.reward for turn in sequence],
        ),
    )
    main_sample, *branches = [_build_sample(request, sequence) for sequence in sequences]

    rewards = main_sample.rewards
    if rewards is None:
        rewards = torch.zeros(len(main_sample.response))
    rewards[-1] += reward
    finish_reason = "length" if is_truncated else main_sample.finish_reason
    return replace(
        main_sample, finish_reason=finish_reason, rewards=rewards, branches=tuple(branches)
    )


def _split_sequences(turns: Sequence[AgentTurn]) -> list[list[AgentTurn]]:
    """Return the turns as sequences in which each turn continues the previous one."""
    # the longest turns come first, so that a turn comes after all turns that continue it
    ordered_turns = sorted(
        turns,
        key=lambda turn: (
            -len(_get_token_bytes(turn)),
            _get_token_bytes(turn),
            -len(turn.input_tokens),
            turn.reward,
        ),
    )
    token_bytes = [_get_token_bytes(turn) for turn in ordered_turns]
    # sequences that continue a turn, by the turn's index; -1 for sequences that continue no turn
    sequences_after: dict[int, list[list[AgentTurn]]] = {}
    for index, turn in enumerate(ordered_turns):
        continuations = sorted(sequences_after.pop(index, []), key=len)
        # the sequence with the most turns continues this turn; the other sequences are branches
        longest_continuation = continuations.pop() if continuations else []

        input_bytes = turn.input_tokens.numpy().tobytes()
        # the first match is the longest prefix, because the turns are in descending order of length
        previous_index = next(
            (
                candidate
                for candidate in range(index + 1, len(ordered_turns))
                if input_bytes.startswith(token_bytes[candidate])
            ),
            -1,
        )
        sequences_after.setdefault(previous_index, []).append([turn, *longest_continuation])
        sequences_after.setdefault(-1, []).extend(continuations)
    return sequences_after[-1]


def _build_sample(request: GenerationRequest, turns: Sequence[AgentTurn]) -> Sample:
    """Return a sequence of turns as one sample; inputs after the first are observations.

    The sample has rewards if one of its turns has a reward.
    """
    prompt = Prompt(request.prompt.id, "", turns[0].input_tokens, request.prompt.metadata)
    sample = create_unfinished_sample(GenerationRequest(prompt, request.sample_index))
    rewards: dict[int, float] = {}
    for turn in turns:
        observation = turn.input_tokens[len(sample.tokens) :].tolist()
        # the engine has accepted this input, so the limit must not reject it again
        sample = append_observation(sample, observation, limit=len(turn.input_tokens) + 1)
        # routing replay is not supported with agents
        sample = append_completion(sample, replace(turn.response, expert_routing=None))
        if turn.reward:
            rewards[len(sample.response) - 1] = turn.reward
    if not rewards:
        return sample
    token_rewards = torch.zeros(len(sample.response))
    token_rewards[[*rewards]] = torch.tensor([*rewards.values()])
    return replace(sample, rewards=token_rewards)


def _get_token_bytes(turn: AgentTurn) -> bytes:
    """Return the input tokens and the generated tokens as bytes."""
    return turn.input_tokens.numpy().tobytes() + turn.generated_tokens.numpy().tobytes()


@dataclass(frozen=True)
class AgentJournal:
    """Journal of the samples of complete agent episodes.

    A sample is stored under its request and under `generated_by`, which contains as JSON values
    everything else that the sample depends on, including the weight version.
    """

    journal: EpisodeJournal

    def find(self, request: GenerationRequest, generated_by: Sequence[Any]) -> Sample | None:
        """Return the recorded sample of a request; None if there is none."""
        key = compute_call_digest(generated_by)
        outcome = self.journal.find(_build_journal_name(request, key), 0, key)
        if outcome is None or not isinstance(outcome.observation, str):
            return None
        (sample,) = samples_from_tensors(load(base64.b85decode(outcome.observation)))
        # the tensors do not contain the prompt's metadata
        metadata = request.prompt.metadata
        branches = sample.branches
        return replace(
            sample,
            metadata=metadata,
            branches=tuple(replace(branch, metadata=metadata) for branch in branches),
        )

    def record(
        self, request: GenerationRequest, generated_by: Sequence[Any], sample: Sample
    ) -> None:
        """Record the sample of an episode, complete or lost, with its branches.

        Raises OSError, with the name of the file, if the journal cannot be written.
        """
        # safetensors stores only contiguous tensors
        tensors = {
            name: tensor.contiguous() for name, tensor in samples_to_tensors([sample]).items()
        }
        key = compute_call_digest(generated_by)
        content = base64.b85encode(save(tensors)).decode()
        self.journal.record(_build_journal_name(request, key), 0, key, Outcome(content, done=True))

    def drop_before(self, first_prompt: int) -> None:
        """Remove the samples of all prompts with an id less than `first_prompt`. Raises OSError."""
        self.journal.forget(
            name for name in self.journal.episodes if int(name.partition("/")[0]) < first_prompt
        )


def _build_journal_name(request: GenerationRequest, call_digest: str) -> str:
    """Return the journal's name of an episode.

    The ids of evaluation prompts also occur as ids of training prompts, so the name contains the
    digest of everything else that the sample depends on.
    """
    return f"{request.prompt.id}/{request.sample_index}/{call_digest}"


@dataclass(frozen=True)
class AgentEpisodes:
    """Starts agent episodes on an engine (`EpisodeSource`).

    The agents run in the worker processes of the pool `agents` and send their requests to `server`.
    """

    engine: GenerationEngine
    agents: EnvironmentPool
    server: AgentServer
    tokenizer: Tokenizer
    settings: EnvironmentConfig
    seed: int
    max_sequence_length: int
    """Maximum number of input and generated tokens of one sequence of an episode."""
    journal: AgentJournal | None = None
    turn_listener: TurnListener | None = None
    sampling_settings: Mapping[str, str] = field(default_factory=dict)
    """See `SessionContext`."""
    uses_local_state = True
    """See `SampleStarter.uses_local_state`."""

    @classmethod
    def create(
        cls,
        engine: GenerationEngine,
        tokenizer: Tokenizer,
        settings: EnvironmentConfig,
        seed: int,
        max_sequence_length: int,
        journal: EpisodeJournal | None = None,
        turn_listener: TurnListener | None = None,
        sampling_settings: Mapping[str, str] = MappingProxyType({}),
    ) -> "AgentEpisodes":
        """Return a source with its own endpoint and worker processes, which are running.

        Args:
            engine: The engine of this rank.
            tokenizer: Tokenizer of the policy.
            settings: The section `environment` of the configuration.
            seed: Seed of the run.
            max_sequence_length: Maximum number of input and generated tokens of one sequence.
            journal: Journal of the run; None if samples are not recorded.
            turn_listener: Called with the turns of each episode that ends; not called for an
                episode from the journal.
            sampling_settings: See `SessionContext`.

        Raises:
            ConfigError: The configured agent does not exist or cannot be imported.
            AlignerError: The endpoint cannot listen on `environment.endpoint_host`.
        """
        warn_if_too_few_files(
            settings.workers * settings.episodes_per_worker,
            f"environment.workers={settings.workers} and"
            f" environment.episodes_per_worker={settings.episodes_per_worker}",
        )
        server = AgentServer(settings.endpoint_host, settings.max_characters)
        server.start()
        try:
            agents = EnvironmentPool.for_agents(settings)
            agents.start()
        except BaseException:
            server.close()
            raise
        agent_journal = None if journal is None else AgentJournal(journal)
        return cls(
            engine,
            agents,
            server,
            tokenizer,
            settings,
            seed,
            max_sequence_length,
            agent_journal,
            turn_listener,
            sampling_settings,
        )

    @cached_property
    def chat(self) -> ChatTurns:
        """The chat template. Raises ConfigError for a model without one."""
        return ChatTurns.for_tokenizer(self.tokenizer)

    def start(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        later: Sequence[GenerationRequest] = (),
    ) -> SamplesInFlight:
        """Start one episode per request.

        The agents' requests, not the prompts of `requests`, are the input of the policy.
        """
        return start_on_replica(
            self.engine, requests, lambda first: self._create_loop([*first, *later], options)
        )

    def _create_loop(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> tuple[EngineLoop, CreateSample]:
        """Return a loop for these requests, and a function that creates the coroutine of an
        episode."""
        # only the context limits a completion; `max_new_tokens` of the step does not
        options = replace(options, max_new_tokens=self.max_sequence_length - 1)
        self.engine.check([], options)
        if requests:
            self.engine.reserve(len(requests), self.max_sequence_length)
        loop = EngineLoop(self.engine)
        # a recorded sample is reused only if all of these are equal
        generated_by = [
            self.engine.version,
            asdict(options),
            self.settings.agent,
            self.settings.agent_command,
            self.settings.failure_reward,
        ]
        branch_counts = _BranchCounts(len(requests))
        session_context = SessionContext(
            self.tokenizer,
            lambda: self.chat,
            self.settings,
            self.max_sequence_length,
            self.sampling_settings,
        )

        def create(index: int, request: GenerationRequest) -> Coroutine[Any, Any, Sample]:
            run = _AgentEpisodeRun(self, loop, index, request, options, branch_counts)
            return run.run(session_context, generated_by)

        return loop, create

    def drop_journal_before(self, first_prompt: int) -> None:
        """See `EpisodeSource.drop_journal_before`."""
        if self.journal is not None:
            self.journal.drop_before(first_prompt)

    def take_environment_wait_s(self) -> float | None:
        """Return None, because the time that an agent waits is not measured."""
        return None

    def close(self) -> None:
        """Stop the agents' processes and the endpoint."""
        self.agents.close()
        self.server.close()


@dataclass
class _BranchCounts:
    """Number of requests of a call's episodes that started a branch, by reason."""

    open_episodes: int
    by_reason: Counter[str] = field(default_factory=Counter)
    dropped_turns: int = 0
    """Number of turns of partial rollouts that the agents did not request again."""

    def add_episode(self, counts: Counter[str], dropped_turns: int = 0) -> None:
        """Add the counts of an episode that has ended; log the totals after the last episode."""
        self.by_reason += counts
        self.dropped_turns += dropped_turns
        self.open_episodes -= 1
        if not self.open_episodes:
            if self.dropped_turns:
                _log.warning(
                    "agent episodes: %d turns of partial rollouts were dropped, because their"
                    " agents did not repeat the requests",
                    self.dropped_turns,
                )
            for reason, count in self.by_reason.most_common():
                _log.info("agent episodes: %d requests started a new branch: %s", count, reason)


class _AgentEpisodeRun:
    """The coroutine of one agent's episode.

    An episode is truncated when it reaches `environment.max_turns`, or when a request of its agent
    leaves no room in the context. An episode whose agent fails after a turn keeps its turns with
    the rewards that the agent has reported. If none of them is for the whole episode,
    `environment.failure_reward` is added. Without any reward, and for all other failures, an
    episode that fails after all retries has the reward NaN, and is not scored.
    """

    def __init__(
        self,
        source: AgentEpisodes,
        loop: EngineLoop,
        index: int,
        request: GenerationRequest,
        options: SamplingOptions,
        branch_counts: _BranchCounts,
    ) -> None:
        """Create the coroutine of the request with index `index`.

        `branch_counts` counts the branches of all episodes of the call.
        """
        self._source = source
        self._loop = loop
        self._index = index
        self._request = request
        self._options = options
        self._branch_counts = branch_counts
        self._recorded_turns = RecordedTurns.from_sample(request.partial_sample)
        """Turns of the partial rollout that the agent has not requested again."""
        self._turns = RecordedTurns()
        """Turns that were generated, or requested again."""
        self._calls = set[asyncio.Task[Any]]()
        """Calls of `_generate` and `_generate_untrained` in progress; used on the endpoint's loop
        only."""
        self._is_interrupted = False
        """Whether no further completion may be requested."""

    async def run(self, session_context: SessionContext, generated_by: Sequence[Any]) -> Sample:
        """Return the sample of the episode, from the journal if the journal contains it.

        `generated_by` contains as JSON values everything that all episodes of the step depend on.
        """
        source = self._source
        request = self._request
        prompt = request.prompt
        task, seed = build_task(prompt, source.tokenizer, source.seed)
        generated_by = [*generated_by, task, seed]
        if request.partial_sample is not None:
            generated_by.append([each.tokens.tolist() for each in request.partial_sample.sequences])
        journal = source.journal
        if journal is not None and (sample := journal.find(request, generated_by)) is not None:
            self._branch_counts.add_episode(Counter())
            return sample

        # the index distinguishes concurrent episodes of the same sample
        name = f"{prompt.id}-{request.sample_index}-{self._index}"
        end_future: Future[BaseException | None] = Future()
        session = AgentSession(
            name,
            session_context,
            self._generate,
            self._check_completion,
            self._generate_untrained,
            lambda: _set_once(end_future, None),
            EpisodeIdentity(seed, prompt.id, request.sample_index),
        )
        source.server.open_session(session)
        fields = {
            "task": task,
            "url": source.server.get_session_url(session),
            "key": session.worker_key,
            "prompt_id": prompt.id,
            "sample_index": request.sample_index,
        }
        # `reset` runs the whole agent; see `AgentRun`
        retries: list[FailureKind] = []

        def should_retry(kind: FailureKind) -> bool:
            # A failure after which the episode keeps its turns is not retried: with the same random
            # numbers, the policy would behave in the same way.
            if self._keeps_turns(session, kind):
                return False
            retries.append(self._correct_kind(session, kind))
            return True

        agent = source.agents.reset(name, fields, seed, should_retry)
        # the episode ends when its agent ends, or when the session has reached a limit
        agent.add_done_callback(lambda future: _set_once(end_future, _get_error(future)))
        try:
            error = await self._loop.wait_for_answer(end_future, self._index)
        except Interrupted:
            self._interrupt_calls()
            for turn in self._recorded_turns:
                self._turns.add(turn)
            return build_partial_sample(request, self._turns)
        finally:
            # close the session first: an agent that still runs must not add turns
            source.server.close_session(session)
            source.agents.finish(name)
            source.engine.release(prompt.id, request.sample_index)
        self._branch_counts.add_episode(session.branch_counts, len(self._recorded_turns))
        sample = self._build_sample(session, error, tuple(retries)).with_data_prompt(prompt.tokens)
        if source.turn_listener is not None:
            source.turn_listener(request, session.turns)
        if journal is not None:
            journal.record(request, generated_by, sample)
        return sample

    def _check_completion(self, stop: tuple[str, ...], grammar: str | None) -> None:
        """Raise AlignerError if the engine cannot generate a completion with these stop strings and
        this grammar; runs in the endpoint's thread."""
        options = self._options
        self._source.engine.check_sampling(
            replace(options, stop=(*options.stop, *stop), grammar=grammar)
        )

    async def _generate(
        self,
        input_tokens: Tensor,
        max_tokens: int,
        stop: tuple[str, ...],
        grammar: str | None,
        repeats: int,
    ) -> Completion:
        """Return a completion that the agent has requested; runs in the endpoint's thread.

        If a partial rollout contains its tokens, only the missing tokens are generated.
        """
        self._begin_call()
        source = self._source
        # input and completion together must fit into the context
        max_tokens = min(max_tokens, source.max_sequence_length - len(input_tokens))
        sampling = replace(
            self._options,
            max_new_tokens=max_tokens,
            min_new_tokens=min(self._options.min_new_tokens, max_tokens),
            stop=(*self._options.stop, *stop),
            grammar=grammar,
        )
        prompt_id = self._request.prompt.id
        key = RequestKey(prompt_id, self._request.sample_index, len(input_tokens), repeats)
        recorded = self._recorded_turns.pop(input_tokens, repeats)
        if recorded is not None and not has_grammar(recorded, grammar):
            recorded = None
        if recorded is not None:
            recorded = cut_at_stop(recorded, input_tokens, sampling, source.tokenizer)
        if recorded is not None and recorded.finish_reason != "interrupted":
            completion = recorded
        else:
            completion = await self._generate_rest(input_tokens, recorded, sampling, key)

        self._turns.add(RecordedTurn(input_tokens, repeats, completion))
        if completion.finish_reason == "interrupted":
            raise asyncio.CancelledError
        return completion

    async def _generate_untrained(
        self,
        request: ModelRequest,
        input_tokens: Tensor,
        max_tokens: int,
        grammar: str | None,
        stream: int,
    ) -> Completion:
        """Return the answer to a request that is not trained on; runs in the endpoint's thread.

        Partial rollouts do not contain it, so it is generated again when the agent repeats the
        request.
        """
        self._begin_call()
        try:
            sampling = build_sampling_options(request, self._options, max_tokens, grammar)
            self._source.engine.check_sampling(sampling)
        except AlignerError as error:
            raise build_refusal(error) from error
        key = RequestKey(
            self._request.prompt.id, self._request.sample_index, len(input_tokens), stream
        )
        completion = await self._source.engine.generate(input_tokens, sampling, key=key)
        if completion.finish_reason == "interrupted":
            raise asyncio.CancelledError
        return completion

    def _begin_call(self) -> None:
        """Count the current task as a call in progress.

        Raises CancelledError if the episode was interrupted; the request is then answered with an
        error.
        """
        if self._is_interrupted:
            raise asyncio.CancelledError
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _generate_rest(
        self,
        input_tokens: Tensor,
        recorded: Completion | None,
        sampling: SamplingOptions,
        key: RequestKey,
    ) -> Completion:
        """Generate a completion that begins with the recorded tokens, if there are any."""
        engine = self._source.engine
        if recorded is None:
            return await engine.generate(input_tokens, sampling, key=key, is_continued=True)
        count = len(recorded.tokens)
        rest = await engine.generate(
            torch.cat([input_tokens, recorded.tokens]),
            replace(
                sampling,
                max_new_tokens=sampling.max_new_tokens - count,
                min_new_tokens=max(0, sampling.min_new_tokens - count),
            ),
            key=key,
            is_continued=True,
            stop_search_start=len(input_tokens) + sampling.min_new_tokens,
            grammar_start=len(input_tokens),
        )
        return join_completions(recorded, rest)

    def _interrupt_calls(self) -> None:
        """End all calls in progress, and record the tokens of turns."""
        server = self._source.server
        self._is_interrupted = True
        # After an iteration of the endpoint's loop, every call has either seen the flag or
        # submitted its request, which the second interruption then completes.
        server.run_on_loop(asyncio.sleep(0))
        if self._source.engine.has_work:
            self._source.engine.interrupt()
        server.run_on_loop(self._wait_for_calls())

    async def _wait_for_calls(self) -> None:
        if self._calls:
            await asyncio.wait(self._calls)

    def _build_sample(
        self,
        session: AgentSession,
        error: BaseException | None,
        retries: tuple[FailureKind, ...],
    ) -> Sample:
        """Return the sample of an ended episode.

        The sample of a failed episode has its turns if `_keeps_turns`, else it is a lost sample.
        """
        failure = self._find_failure(session, error)
        credit = session.credit
        report = EpisodeReport(failure, retries, credit.metrics)
        if failure is None or self._keeps_turns(session, failure):
            reward = credit.episode_reward
            if failure is not None and reward is None:
                # rewards of turns do not replace it: an environment's turns keep theirs, too
                reward = self._source.settings.failure_reward
            sample = build_episode_sample(
                self._request,
                session.get_rewarded_turns(),
                reward or 0.0,
                is_truncated=session.is_truncated,
            )
            # a failure without turns has no attributable kind
            assert sample is not None
            return with_report(sample, report)
        report_lost_episode(
            str(error or f"episode {session.name}: no completion was generated for its agent")
        )
        lost_sample = build_lost_sample(self._request, self._source.tokenizer.pad_token_id)
        return with_report(lost_sample, report)

    def _find_failure(
        self, session: AgentSession, error: BaseException | None
    ) -> FailureKind | None:
        """Return the kind of the failure of an ended episode; None if it did not fail.

        An agent may fail because a limit has truncated its episode; this is no failure.
        """
        if session.turns and (error is None or session.is_truncated):
            return None
        if error is None:
            kind = FailureKind.NO_TURN
        elif isinstance(error, EpisodeLost):
            kind = error.kind
        else:
            kind = FailureKind.INFRASTRUCTURE
        return self._correct_kind(session, kind)

    def _correct_kind(self, session: AgentSession, kind: FailureKind) -> FailureKind:
        """Return the kind of a failure of the session's agent, from the kind that the pool found.

        The pool knows neither the turns nor the requests of the agent.
        """
        if session.has_server_error:
            return FailureKind.INFRASTRUCTURE
        return kind if session.turns else kind.before_first_turn()

    def _keeps_turns(self, session: AgentSession, kind: FailureKind) -> bool:
        """Return whether an episode that has failed keeps its turns: the policy may have caused the
        failure, and there is a reward for it."""
        failure_reward = self._source.settings.failure_reward
        has_reward = session.credit.has_reward or failure_reward is not None
        return has_reward and self._correct_kind(session, kind).is_attributable


def _set_once(future: "Future[BaseException | None]", value: BaseException | None) -> None:
    """Set the result of a future; do nothing if it already has one."""
    if not future.done():
        future.set_result(value)


def _get_error(agent: "Future[Outcome]") -> BaseException | None:
    """Return the error of an agent that has ended; None if it was stopped."""
    return None if agent.cancelled() else agent.exception()
