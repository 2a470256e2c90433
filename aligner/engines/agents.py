"""Episodes of agents that have an OpenAI client of their own: what they ask for is drawn, and
becomes samples."""

import contextlib
import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from aligner.data.chat_turns import ChatTurns
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample
from aligner.engines.agent_journal import AgentJournal
from aligner.engines.agent_samples import episode_sample
from aligner.engines.engine_protocol import (
    BeginsTurns,
    GenerationRequest,
    SamplingOptions,
    TurnGeneration,
)
from aligner.engines.episodes import lost_sample, task_of
from aligner.environments.agent_server import AgentServer
from aligner.environments.agent_session import AgentSession, Ask, SessionMeans
from aligner.environments.environment_pool import EnvironmentPool
from aligner.environments.episode_environment import Outcome
from aligner.environments.episode_journal import EpisodeJournal
from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)

_WAIT_S = 0.1
"""Where all episodes wait for their agents a step ends after so long, for who waits for it to see
life, or has new weights."""


@dataclass(frozen=True)
class AgentEngine:
    """An engine whose responses are episodes of agents, which run in processes of `agents` and ask
    `server`."""

    engine: BeginsTurns
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
        engine: BeginsTurns,
        tokenizer: Tokenizer,
        settings: EnvironmentConfig,
        seed: int,
        context: int,
        journal: EpisodeJournal | None = None,
    ) -> "AgentEngine":
        """With an endpoint and processes of its own. Raises ConfigError where there is no such
        agent, and AlignerError."""
        server = AgentServer(settings.endpoint_host, settings.max_characters)
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
    ) -> "AgentGeneration":
        """Begin one episode a request; as `GenerationEngine.start`. What is read is the agents',
        not the requests' prompts."""
        options = replace(options, max_new_tokens=self.context - 1)
        # Nothing is drawn for these: they have the engine make room for sequences of the whole
        # context.
        rooms = [
            replace(
                each,
                prompt=replace(each.prompt, tokens=each.prompt.tokens[:1]),
                max_new_tokens=None,
                waits=True,
            )
            for each in requests
        ]
        by = [
            self.engine.version,
            asdict(options),
            self.settings.agent,
            self.settings.agent_command,
        ]
        return AgentGeneration(self, requests, self.engine.start(rooms, options), by)

    def forget(self, first: int) -> None:
        """As `DrawsEpisodes`."""
        if self.journal is not None:
            self.journal.forget(first)

    def take_waits(self) -> float | None:
        """As `DrawsEpisodes`: not told, an agent works and waits in turns of its own."""
        return None

    def close(self) -> None:
        """End the agents' processes and the endpoint."""
        self.agents.close()
        self.server.close()


@dataclass
class _Episode:
    request: GenerationRequest
    session: AgentSession
    by: Sequence[Any]
    """What it is drawn by, JSON."""
    ends: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Sequences that can go on, as bytes of their tokens: their places in the generation, and a
    turn's most tokens."""


class AgentGeneration:
    """A `Generation` of agents' episodes: what the endpoint is asked for is drawn, until every
    agent has come to its end.

    An episode is cut where it reaches `environment.max_turns`, or where what it reads leaves no
    room. One whose agent fails for good, or never asks, comes with a reward that is not a number,
    which no score is made of.
    """

    def __init__(
        self,
        means: AgentEngine,
        requests: Sequence[GenerationRequest],
        generation: TurnGeneration,
        by: Sequence[Any],
    ) -> None:
        """`by` is what all episodes are drawn by, JSON: one that the journal has of the same is
        told from there."""
        self._means, self._generation, self._by = means, generation, by
        self._events = queue.SimpleQueue[Callable[[], None]]()
        """What other threads want done here."""
        self._open: dict[int, _Episode] = {}
        self._drawing: dict[int, tuple[int, Ask]] = {}
        """What is asked for, with its episode's place, by its place in the engine's generation."""
        self._complete: list[tuple[int, Sample]] = []
        self._branches = Counter[str]()
        sessions = SessionMeans(means.tokenizer, lambda: means.chat, means.settings, means.context)
        for place, request in enumerate(requests):
            self._begin(place, request, sessions)

    @property
    def done(self) -> bool:
        """Whether every episode is complete, and given out."""
        return not (self._open or self._complete)

    def step(self) -> list[tuple[int, Sample]]:
        """Go on with what agents have asked for, a step of the engine's; waits for an agent where
        nothing is to be drawn."""
        if self._generation.done and not self._complete:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=_WAIT_S)()
        while not self._events.empty():
            self._events.get()()
        if not self._generation.done:
            for place, sample in self._generation.step():
                self._drawn(place, sample)
        complete, self._complete = self._complete, []
        if self.done:
            self._generation.cancel()  # what nobody waits for any more
            for reason, count in self._branches.most_common():
                _log.info("agent episodes: %d requests started a new branch: %s", count, reason)
        return complete

    def unfinished(self) -> list[tuple[int, Sample]]:
        """Not told: an agent cannot be handed over."""
        raise AlignerError(
            "environment.agent: agent episodes cannot be carried over as partial rollouts; set"
            " rollout.spare_prompts=0"
        )

    def cancel(self) -> None:
        """Drop what is not complete."""
        for place in [*self._open]:
            self._close(place)
        self._generation.cancel()
        self._complete.clear()

    def _begin(self, place: int, request: GenerationRequest, sessions: SessionMeans) -> None:
        means, prompt = self._means, request.prompt
        task, seed = task_of(prompt, means.tokenizer, means.seed)
        by = [*self._by, task, seed]
        if means.journal is not None and (sample := means.journal.told(request, by)) is not None:
            self._complete.append((place, sample))
            return
        name = f"{prompt.id}-{request.sample_index}-{place}"

        def submit(ask: Ask) -> None:
            self._events.put(partial(self._ask, place, ask))

        session = AgentSession(
            name, sessions, submit, lambda: self._events.put(partial(self._end, place))
        )
        self._open[place] = _Episode(request, session, by)
        means.server.open(session)
        told = {"task": task, "url": means.server.url(session), "key": session.key}
        ended = means.agents.reset(name, told, seed)
        ended.add_done_callback(
            lambda future: self._events.put(partial(self._ended, place, future))
        )

    def _ask(self, place: int, ask: Ask) -> None:
        """Draw a response, behind the sequence that it goes on from where there is one."""
        if (episode := self._open.get(place)) is None:
            return
        read, request = ask.read.numpy().tobytes(), episode.request
        goes_on = [
            end
            for end, (_, most) in episode.ends.items()
            if read.startswith(end) and most == ask.most_tokens
        ]
        if goes_on and not ask.asked_before:
            before = max(goes_on, key=len)
            at, _ = episode.ends.pop(before)
            self._generation.go_on(at, ask.read[len(before) // ask.read.itemsize :].tolist())
        else:
            prompt = Prompt(request.prompt.id, "", ask.read, request.prompt.metadata)
            room = self._means.context - len(ask.read)
            at = self._generation.add(
                GenerationRequest(
                    prompt,
                    request.sample_index,
                    room,
                    turn_tokens=ask.most_tokens,
                    asked_before=ask.asked_before,
                )
            )
        self._drawing[at] = place, ask

    def _drawn(self, at: int, sample: Sample) -> None:
        """A response is complete: have its client get it."""
        place, ask = self._drawing.pop(at)
        if (episode := self._open.get(place)) is None:
            self._generation.leave(at)
            return
        episode.ends[sample.tokens.numpy().tobytes()] = at, ask.most_tokens
        self._means.server.call(ask.give, sample)

    def _ended(self, place: int, future: "Future[Outcome]") -> None:
        """The agent has come to its end, or is given up."""
        if not future.cancelled():
            self._end(place, future.exception())

    def _end(self, place: int, error: BaseException | None = None) -> None:
        """End an episode with what was drawn."""
        if (episode := self._open.get(place)) is None:
            return
        self._close(place)
        session, sample = episode.session, None
        self._branches += session.branches
        if error is None or session.is_cut:
            sample = episode_sample(
                episode.request, session.turns, session.reward, is_cut=session.is_cut
            )
        if sample is None:
            _log.warning(
                "%s",
                error
                or f"episode {session.name} is lost: no completion was generated for its agent",
            )
            sample = lost_sample(episode.request, self._means.tokenizer.pad_token_id)
        if (journal := self._means.journal) is not None:
            journal.record(episode.request, episode.by, sample)
        self._complete.append((place, sample))

    def _close(self, place: int) -> None:
        episode = self._open.pop(place)
        self._means.server.close_session(episode.session)
        self._means.agents.finish(episode.session.name)
        for at, _ in episode.ends.values():
            self._generation.leave(at)
