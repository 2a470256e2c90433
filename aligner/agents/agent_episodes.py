"""The turns of an agent's episode as samples: each token that was drawn is in one of them, as
drawn."""

import base64
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
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


def episode_sample(
    request: GenerationRequest, turns: Sequence[AgentTurn], reward: float, *, is_cut: bool
) -> Sample | None:
    """An episode's sample, with what does not belong to its main sequence as branches; None where
    there were no turns.

    A turn goes on from the one whose tokens, read and drawn, are the longest that it begins with.
    Of several that go on from one turn the one with the most turns behind it stays in its sequence;
    what the others have read is their prompt. The main sequence is the one with the most turns, and
    of these the longest. So nothing hangs on the order of the turns. The reward is given for the
    main sequence's last token.
    """
    if not turns:
        return None
    sequences = sorted(
        _sequences(turns), key=lambda each: (-len(each), -len(_end(each[-1])), _end(each[-1]))
    )
    main, *others = [_sample(request, each) for each in sequences]
    rewards = torch.zeros(len(main.response))
    rewards[-1] = reward
    reason = "length" if is_cut else main.finish_reason
    return replace(main, finish_reason=reason, rewards=rewards, branches=tuple(others))


def _sequences(turns: Sequence[AgentTurn]) -> list[list[AgentTurn]]:
    """The turns in rows, of which each goes on from the one before it."""
    ordered = sorted(turns, key=lambda turn: (-len(_end(turn)), _end(turn), -len(turn.read)))
    ends = [_end(turn) for turn in ordered]
    following: dict[int, list[list[AgentTurn]]] = {}
    """What goes on from a turn, by its place; -1: from none."""
    for place, turn in enumerate(ordered):  # a turn comes after all that go on from it
        behind = sorted(following.pop(place, []), key=len)
        longest = behind.pop() if behind else []
        read = turn.read.numpy().tobytes()
        before = next(
            (at for at in range(place + 1, len(ordered)) if read.startswith(ends[at])), -1
        )
        following.setdefault(before, []).append([turn, *longest])
        following.setdefault(-1, []).extend(behind)
    return following[-1]


def _sample(request: GenerationRequest, turns: Sequence[AgentTurn]) -> Sample:
    """Return the sequence of turns that continue each other as one sample."""
    prompt = Prompt(request.prompt.id, "", turns[0].read, request.prompt.metadata)
    sample = unfinished_sample(GenerationRequest(prompt, request.sample_index))
    for turn in turns:
        observation = turn.read[len(sample.tokens) :].tolist()
        sample = with_observation(sample, observation, limit=len(turn.read) + 1)
        sample = with_completion(sample, replace(turn.response, routes=None))
    return sample


def _end(turn: AgentTurn) -> bytes:
    """All that was read and drawn, as bytes."""
    return turn.read.numpy().tobytes() + turn.drawn.numpy().tobytes()


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentJournal:
    """Samples by their requests and by what else they were drawn by, `by`: JSON, the weights'
    version among it."""

    journal: EpisodeJournal

    def told(self, request: GenerationRequest, by: Sequence[Any]) -> Sample | None:
        """The sample that was recorded; None where none was."""
        asked = digest(by)
        outcome = self.journal.told(_name(request, asked), 0, asked)
        if outcome is None or not isinstance(outcome.observation, str):
            return None
        (sample,) = samples_from_tensors(load(base64.b85decode(outcome.observation)))
        metadata, branches = request.prompt.metadata, sample.branches
        return replace(
            sample,
            metadata=metadata,
            branches=tuple(replace(each, metadata=metadata) for each in branches),
        )

    def record(self, request: GenerationRequest, by: Sequence[Any], sample: Sample) -> None:
        """Note an episode's sample, with its branches, or that it was lost. Raises OSError, which
        names the file."""
        tensors = {
            name: tensor.contiguous() for name, tensor in samples_to_tensors([sample]).items()
        }
        asked, said = digest(by), base64.b85encode(save(tensors)).decode()
        self.journal.record(_name(request, asked), 0, asked, Outcome(said, done=True))

    def forget(self, first: int) -> None:
        """Drop those of prompts before the `first` of the stream. Raises OSError."""
        self.journal.forget(
            name for name in self.journal.episodes if int(name.partition("/")[0]) < first
        )


def _name(request: GenerationRequest, asked: str) -> str:
    """An evaluation's prompts have the numbers of others; what they are drawn by tells them
    apart."""
    return f"{request.prompt.id}/{request.sample_index}/{asked}"


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
        return ChatTurns.for_tokenizer(self.tokenizer)

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
