"""Episodes of agents that have an OpenAI client of their own: what they ask for is drawn, and
becomes samples."""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from aligner.data.chat_turns import ChatTurns
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Sample
from aligner.engines.agent_journal import AgentJournal
from aligner.engines.agent_samples import episode_sample
from aligner.engines.engine_loop import (
    EngineLoop,
    Interrupted,
    SamplesInFlight,
    start_on_replica,
)
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
)
from aligner.engines.episodes import lost_sample, task_of
from aligner.environments.agent_server import AgentServer
from aligner.environments.agent_session import AgentSession, SessionMeans
from aligner.environments.environment_pool import EnvironmentPool
from aligner.environments.episode_environment import Outcome
from aligner.environments.episode_journal import EpisodeJournal
from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentEpisodes:
    """An engine whose responses are episodes of agents, which run in processes of `agents` and ask
    `server`."""

    engine: GenerationEngine
    agents: EnvironmentPool
    server: AgentServer
    tokenizer: Tokenizer
    settings: EnvironmentConfig
    seed: int
    context: int
    """Most tokens of what an episode reads and draws in one sequence."""
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
        """With an endpoint and processes of its own. Raises ConfigError where there is no such
        agent, and AlignerError."""
        server = AgentServer(settings.endpoint_host, settings.most_characters)
        server.start()
        try:
            agents = EnvironmentPool.of_agents(settings)
            agents.start()
        except BaseException:
            server.close()
            raise
        kept = None if journal is None else AgentJournal(journal)
        return cls(engine, agents, server, tokenizer, settings, seed, context, kept)

    @cached_property
    def chat(self) -> ChatTurns:
        """How chat messages go on. Raises ConfigError for a model without a chat template."""
        return ChatTurns.of(self.tokenizer)

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> SamplesInFlight:
        """Start one episode per request. The agents' requests, not the requests' prompts, are the
        input of the policy."""
        return start_on_replica(self.engine, requests, lambda: self._start(requests, options))

    def _start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> EngineLoop:
        options = replace(options, max_new_tokens=self.context - 1)
        self.engine.check([], options)
        loop = EngineLoop(self.engine)
        if requests:
            self.engine.reserve(len(requests), self.context)
        generated_by = [
            self.engine.version,
            asdict(options),
            self.settings.agent,
            self.settings.agent_command,
        ]
        branches = Counter[str]()
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
        """End the agents' processes and the endpoint."""
        self.agents.close()
        self.server.close()


class _AgentRun:
    """The coroutine of one agent's episode.

    An episode is truncated when it reaches `environment.max_turns`, or when a request of its agent
    leaves no room in the context. An episode whose agent fails for good, or requests nothing, has
    the reward NaN, and is not scored.
    """

    def __init__(
        self,
        source: AgentEpisodes,
        loop: EngineLoop,
        index: int,
        request: GenerationRequest,
        options: SamplingOptions,
        branches: Counter[str],
    ) -> None:
        """`branches` counts the requests of all episodes that started a branch, by reason."""
        self._source = source
        self._loop = loop
        self._index = index
        self._request = request
        self._options = options
        self._branches = branches

    async def run(self, common: SessionMeans, generated_by: Sequence[Any]) -> Sample:
        """Return the sample of the episode, from the journal if the journal contains it.

        `generated_by`, JSON, is everything that all episodes of the call depend on.
        """
        source = self._source
        request = self._request
        prompt = request.prompt
        task, seed = task_of(prompt, source.tokenizer, source.seed)
        generated_by = [*generated_by, task, seed]
        journal = source.journal
        if journal is not None and (sample := journal.told(request, generated_by)) is not None:
            return sample

        name = f"{prompt.id}-{request.sample_index}-{self._index}"
        ended: Future[BaseException | None] = Future()
        session = AgentSession(name, common, self._generate, lambda: _set(ended, None))
        source.server.open(session)
        fields = {"task": task, "url": source.server.url(session), "key": session.key}
        agent = source.agents.reset(name, fields, seed)
        agent.add_done_callback(lambda future: _set(ended, _error_of(future)))
        try:
            error = await self._loop.answer(ended, self._index)
        except Interrupted:
            raise AlignerError(
                "environment.agent: agent episodes cannot be carried over as partial rollouts; set"
                " rollout.spare_prompts=0"
            ) from None
        finally:
            source.server.close_session(session)
            source.agents.finish(name)
            source.engine.release(prompt.id, request.sample_index)
        sample = self._sample(session, error)
        if journal is not None:
            journal.record(request, generated_by, sample)
        return sample

    async def _generate(self, read: Tensor, most_tokens: int, repeats: int) -> Completion:
        """Generate a completion that the agent has requested; called by the endpoint's thread."""
        source = self._source
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
        self._branches += session.branches
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
    if not future.done():
        future.set_result(value)


def _error_of(agent: "Future[Outcome]") -> BaseException | None:
    """Return the error of an agent that has ended; None if it was stopped."""
    return None if agent.cancelled() else agent.exception()
