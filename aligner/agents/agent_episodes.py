"""Episodes of agents that bring their own OpenAI client.

`AgentEpisodes` starts the agents of a step in worker processes, and serves their requests with the
engine. `episode_sample` combines the turns of an episode into token sequences: each generated token
is part of exactly one of them. `AgentJournal` records the samples of complete episodes, so that a
resumed run does not repeat them.
"""

import base64
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from aligner.agents.agent_endpoint import AgentServer, AgentSession, AgentTurn, SessionMeans
from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_environment import Outcome
from aligner.agents.episode_journal import EpisodeJournal, digest
from aligner.agents.episodes import lost_sample, task_of
from aligner.data.chat_turns import ChatTurns
from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Prompt, Sample
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

_log = logging.getLogger(__name__)


def episode_sample(
    request: GenerationRequest, turns: Sequence[AgentTurn], reward: float, *, is_cut: bool
) -> Sample | None:
    """Return the sample of an episode, with all sequences except the main one as branches.

    A turn continues the turn with the longest tokens (input and generated tokens) that are a prefix
    of its own input. If several turns continue the same turn, the one that most turns follow stays
    in the sequence; each of the others starts a branch, whose prompt is the turn's input. The main
    sequence is the one with the most turns, and the longest of these. The result does not depend on
    the order of the turns. The last token of the main sequence gets the reward.

    Returns None if there are no turns.
    """
    if not turns:
        return None
    sequences = sorted(
        _sequences(turns),
        key=lambda sequence: (-len(sequence), -len(_end(sequence[-1])), _end(sequence[-1])),
    )
    main, *others = [_sample(request, sequence) for sequence in sequences]

    rewards = torch.zeros(len(main.response))
    rewards[-1] = reward
    reason = "length" if is_cut else main.finish_reason
    return replace(main, finish_reason=reason, rewards=rewards, branches=tuple(others))


def _sequences(turns: Sequence[AgentTurn]) -> list[list[AgentTurn]]:
    """Return the turns as sequences in which each turn continues the previous one."""
    # the longest turns come first, so that a turn comes after all turns that continue it
    ordered = sorted(turns, key=lambda turn: (-len(_end(turn)), _end(turn), -len(turn.read)))
    ends = [_end(turn) for turn in ordered]
    # sequences that continue a turn, by the turn's index; -1 for sequences that continue no turn
    sequences_after: dict[int, list[list[AgentTurn]]] = {}
    for index, turn in enumerate(ordered):
        continuations = sorted(sequences_after.pop(index, []), key=len)
        longest = continuations.pop() if continuations else []
        input_bytes = turn.read.numpy().tobytes()
        # the first match is the longest prefix, because the ends are in descending order of length
        previous = next(
            (
                candidate
                for candidate in range(index + 1, len(ordered))
                if input_bytes.startswith(ends[candidate])
            ),
            -1,
        )
        sequences_after.setdefault(previous, []).append([turn, *longest])
        sequences_after.setdefault(-1, []).extend(continuations)
    return sequences_after[-1]


def _sample(request: GenerationRequest, turns: Sequence[AgentTurn]) -> Sample:
    """Return a sequence of turns as one sample; inputs after the first are observations."""
    prompt = Prompt(request.prompt.id, "", turns[0].read, request.prompt.metadata)
    sample = unfinished_sample(GenerationRequest(prompt, request.sample_index))
    for turn in turns:
        observation = turn.read[len(sample.tokens) :].tolist()
        sample = with_observation(sample, observation, limit=len(turn.read) + 1)
        sample = with_completion(sample, replace(turn.response, routes=None))
    return sample


def _end(turn: AgentTurn) -> bytes:
    """Return the input tokens and the generated tokens as bytes."""
    return turn.read.numpy().tobytes() + turn.drawn.numpy().tobytes()


@dataclass(frozen=True)
class AgentJournal:
    """Journal of the samples of complete agent episodes.

    A sample is stored under its request and under `by`, which contains as JSON values everything
    else that the sample depends on, including the weight version.
    """

    journal: EpisodeJournal

    def told(self, request: GenerationRequest, by: Sequence[Any]) -> Sample | None:
        """Return the recorded sample of a request; None if there is none."""
        key = digest(by)
        outcome = self.journal.told(_name(request, key), 0, key)
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

    def record(self, request: GenerationRequest, by: Sequence[Any], sample: Sample) -> None:
        """Record the sample of an episode, with its branches; a lost episode has one too.

        Raises OSError, with the name of the file, if the journal cannot be written.
        """
        tensors = {
            name: tensor.contiguous() for name, tensor in samples_to_tensors([sample]).items()
        }
        key = digest(by)
        content = base64.b85encode(save(tensors)).decode()
        self.journal.record(_name(request, key), 0, key, Outcome(content, done=True))

    def forget(self, first: int) -> None:
        """Remove the samples of all prompts whose id is less than `first`. Raises OSError."""
        self.journal.forget(
            name for name in self.journal.episodes if int(name.partition("/")[0]) < first
        )


def _name(request: GenerationRequest, asked: str) -> str:
    """Return the journal's name of an episode.

    The ids of evaluation prompts also occur as ids of training prompts, so the name contains the
    digest of everything else that the sample depends on.
    """
    return f"{request.prompt.id}/{request.sample_index}/{asked}"


@dataclass(frozen=True)
class AgentEpisodes:
    """Starts agent episodes on an engine (`SampleSource`).

    The agents run in the worker processes of the pool `agents` and send their requests to `server`.
    """

    engine: GenerationEngine
    agents: EnvironmentPool
    server: AgentServer
    tokenizer: Tokenizer
    settings: EnvironmentConfig
    seed: int
    context: int
    """Maximum number of input and generated tokens of one sequence of an episode."""
    journal: AgentJournal | None = None

    @classmethod
    def begin(
        cls,
        engine: GenerationEngine,
        tokenizer: Tokenizer,
        settings: EnvironmentConfig,
        seed: int,
        context: int,
        journal: EpisodeJournal | None = None,
    ) -> "AgentEpisodes":
        """Return a source with its own endpoint and worker processes, which are running.

        Args:
            engine: The engine of this rank.
            tokenizer: Tokenizer of the policy.
            settings: The section `environment` of the configuration.
            seed: Seed of the run.
            context: Maximum number of tokens of one sequence.
            journal: Journal of the run; None if samples are not recorded.

        Raises:
            ConfigError: The configured agent does not exist or cannot be imported.
            AlignerError: The endpoint cannot listen on `environment.endpoint_host`.
        """
        server = AgentServer(settings.endpoint_host, settings.max_characters)
        server.start()
        try:
            agents = EnvironmentPool.of_agents(settings)
            agents.start()
        except BaseException:
            server.close()
            raise
        agent_journal = None if journal is None else AgentJournal(journal)
        return cls(engine, agents, server, tokenizer, settings, seed, context, agent_journal)

    @cached_property
    def chat(self) -> ChatTurns:
        """The chat template. Raises ConfigError for a model without one."""
        return ChatTurns.for_tokenizer(self.tokenizer)

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> SamplesInFlight:
        """Start one episode per request.

        The agents' requests, not the prompts of `requests`, are the input of the policy.
        """
        return start_on_replica(self.engine, requests, lambda: self._start(requests, options))

    def _start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> EngineLoop:
        """Return a loop with one coroutine per episode."""
        # the context limits a completion, not the maximum number of response tokens
        options = replace(options, max_new_tokens=self.context - 1)
        self.engine.check([], options)
        if requests:
            self.engine.reserve(len(requests), self.context)
        loop = EngineLoop(self.engine)
        # a recorded sample is reused only if all of these are equal
        generated_by = [
            self.engine.version,
            asdict(options),
            self.settings.agent,
            self.settings.agent_command,
        ]
        branches = _BranchCounts(len(requests))
        common = SessionMeans(self.tokenizer, lambda: self.chat, self.settings, self.context)
        for index, request in enumerate(requests):
            run = _AgentRun(self, loop, index, request, options, branches)
            loop.spawn(index, run.run(common, generated_by))
        return loop

    def forget(self, first: int) -> None:
        """See `SampleSource.forget`."""
        if self.journal is not None:
            self.journal.forget(first)

    def take_waits(self) -> float | None:
        """Return None: the time that an agent waits is not known."""
        return None

    def close(self) -> None:
        """Stop the agents' processes and the endpoint."""
        self.agents.close()
        self.server.close()


@dataclass
class _BranchCounts:
    """How often requests of a call's episodes started a branch, by reason."""

    open_episodes: int
    by_reason: Counter[str] = field(default_factory=Counter)

    def add_episode(self, branches: Counter[str]) -> None:
        """Add the branches of an episode that has ended; log all counts after the last one."""
        self.by_reason += branches
        self.open_episodes -= 1
        if not self.open_episodes:
            for reason, count in self.by_reason.most_common():
                _log.info("agent episodes: %d requests started a new branch: %s", count, reason)


class _AgentRun:
    """The coroutine of one agent's episode.

    An episode is truncated when it reaches `environment.max_turns`, or when a request of its agent
    leaves no room in the context. An episode whose agent fails after all retries, or sends no
    request, has the reward NaN, and is not scored.
    """

    def __init__(
        self,
        source: AgentEpisodes,
        loop: EngineLoop,
        index: int,
        request: GenerationRequest,
        options: SamplingOptions,
        branches: "_BranchCounts",
    ) -> None:
        """Create the coroutine of the request with index `index`.

        `branches` counts the branches of all episodes of the call.
        """
        self._source = source
        self._loop = loop
        self._index = index
        self._request = request
        self._options = options
        self._branches = branches

    async def run(self, common: SessionMeans, generated_by: Sequence[Any]) -> Sample:
        """Return the sample of the episode, from the journal if the journal contains it.

        `generated_by` contains as JSON values everything that all episodes of the step depend on.
        """
        source = self._source
        request = self._request
        prompt = request.prompt
        task, seed = task_of(prompt, source.tokenizer, source.seed)
        generated_by = [*generated_by, task, seed]
        journal = source.journal
        if journal is not None and (sample := journal.told(request, generated_by)) is not None:
            self._branches.add_episode(Counter())
            return sample

        # the index distinguishes concurrent episodes of the same sample
        name = f"{prompt.id}-{request.sample_index}-{self._index}"
        end_future: Future[BaseException | None] = Future()
        session = AgentSession(name, common, self._generate, lambda: _set(end_future, None))
        source.server.open(session)
        fields = {"task": task, "url": source.server.url(session), "key": session.key}
        agent = source.agents.reset(name, fields, seed)
        # the episode ends when its agent ends, or when the session has reached a limit
        agent.add_done_callback(lambda future: _set(end_future, _error_of(future)))
        try:
            error = await self._loop.answer(end_future, self._index)
        except Interrupted:
            raise AlignerError(
                "environment.agent: agent episodes cannot be carried over as partial rollouts; set"
                " rollout.spare_prompts=0"
            ) from None
        finally:
            source.server.close_session(session)
            source.agents.finish(name)
            source.engine.release(prompt.id, request.sample_index)
        self._branches.add_episode(session.branches)
        sample = self._sample(session, error)
        if journal is not None:
            journal.record(request, generated_by, sample)
        return sample

    async def _generate(self, read: Tensor, most_tokens: int, repeats: int) -> Completion:
        """Generate a completion that the agent has requested; runs in the endpoint's thread."""
        source = self._source
        # input and completion together must fit into the context
        room = min(most_tokens, source.context - len(read))
        sampling = replace(
            self._options,
            max_new_tokens=room,
            min_new_tokens=min(self._options.min_new_tokens, room),
        )
        prompt_id = self._request.prompt.id
        key = RequestKey(prompt_id, self._request.sample_index, len(read), repeats)
        return await source.engine.generate(read, sampling, key=key, is_continued=True)

    def _sample(self, session: AgentSession, error: BaseException | None) -> Sample:
        """Return the sample of an ended episode; a lost sample if its agent failed or made no turn.

        An agent may fail because a limit has truncated its episode; such an episode is not lost.
        """
        sample = None
        if error is None or session.is_cut:
            sample = episode_sample(
                self._request, session.turns, session.reward, is_cut=session.is_cut
            )
        if sample is not None:
            return sample
        _log.warning(
            "%s",
            error or f"episode {session.name} is lost: no completion was generated for its agent",
        )
        return lost_sample(self._request, self._source.tokenizer.pad_token_id)


def _set(future: "Future[BaseException | None]", value: BaseException | None) -> None:
    """Set the result of a future; do nothing if it already has one."""
    if not future.done():
        future.set_result(value)


def _error_of(agent: "Future[Outcome]") -> BaseException | None:
    """Return the error of an agent that has ended; None if it was stopped."""
    return None if agent.cancelled() else agent.exception()
