"""Episodes: responses of several turns, and what an environment says between them."""

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from aligner.data.chat_turns import ChatTurns, Conversation, Unsafe
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import format_of
from aligner.data.types import FinishReason, Sample
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions, TurnGeneration
from aligner.environments.environment_pool import EnvironmentPool
from aligner.environments.episode_environment import EpisodeLost, Observation, Outcome
from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeEngine:
    """An engine whose responses are episodes in environments of this process's own."""

    engine: GenerationEngine
    environments: EnvironmentPool
    tokenizer: Tokenizer
    settings: EnvironmentConfig
    seed: int

    @cached_property
    def chat(self) -> ChatTurns:
        """How chat messages go on. Raises ConfigError for a model without a chat template."""
        return ChatTurns(self.tokenizer, format_of(self.tokenizer))

    def start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> "EpisodeGeneration":
        """Begin one episode a request; as `GenerationEngine.start`."""
        turn_end = self.tokenizer.single_token(self.settings.turn_end, "environment.turn_end")
        ends = options.stop_token_ids if turn_end is None else (*options.stop_token_ids, turn_end)
        turns = [replace(each, turn_tokens=self.settings.max_turn_tokens, waits=True) for each in requests]
        return EpisodeGeneration(self, requests, self.engine.start(turns, replace(options, stop_token_ids=ends)))


@dataclass
class _Episode:
    name: str
    request: GenerationRequest
    sample: Sample | None = None
    """As it was at the end of the last turn."""
    turn: Tensor | None = None
    """The last one's tokens, its end among them."""
    turns: int = 0
    conversation: Conversation | None = None
    """As it was when the policy last had to answer; None where it is no chat's."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """By the response token that each was given for, a turn's last one."""


class EpisodeGeneration:
    """A `Generation` of episodes: while environments answer some of them, the engine draws turns of the others.

    An episode ends where its environment says so; it is cut where a turn, the response or the number of turns reaches its
    limit. One whose environment fails for good comes with a reward that is not a number, which no score is made of.
    """

    def __init__(self, means: EpisodeEngine, requests: Sequence[GenerationRequest], generation: TurnGeneration) -> None:
        self._means, self._generation = means, generation
        self._open: dict[int, _Episode] = {}
        self._asked: dict[Future[Outcome], int] = {}
        self._complete: list[tuple[int, Sample]] = []
        for place, request in enumerate(requests):
            prompt = request.prompt
            episode = self._open[place] = _Episode(f"{prompt.id}/{request.sample_index}/{place}", request)
            task = {**prompt.metadata, "prompt": means.tokenizer.decode(prompt.tokens)}
            # A prompt's samples meet the same environment.
            seed = means.seed * 1_000_003 + prompt.id
            self._asked[means.environments.reset(episode.name, task, seed)] = place

    @property
    def done(self) -> bool:
        """Whether every episode is complete, and given out."""
        return not (self._open or self._complete)

    def step(self) -> list[tuple[int, Sample]]:
        """Go on with what environments have answered, a step of the engine's; waits for an answer where all wait for one."""
        if self._generation.done and not self._complete:
            wait(self._asked, return_when=FIRST_COMPLETED)
        answered = [future for future in self._asked if future.done()]
        for future in sorted(answered, key=lambda each: self._asked[each]):
            self._hear(self._asked.pop(future), future)
        if not self._generation.done:
            for place, sample in self._generation.step():
                self._act(place, sample)
        complete, self._complete = self._complete, []
        return complete

    def unfinished(self) -> list[tuple[int, Sample]]:
        """Not told: an environment cannot be handed over."""
        raise AlignerError("environment.target: episodes under way cannot be handed over; give rollout.spare_prompts=0")

    def cancel(self) -> None:
        """Drop what is not complete."""
        self._generation.cancel()
        for episode in self._open.values():
            self._means.environments.finish(episode.name)
        self._open.clear()
        self._asked.clear()
        self._complete.clear()

    def _act(self, place: int, sample: Sample) -> None:
        """A turn has ended: have the environment answer it."""
        episode, tokenizer = self._open[place], self._means.tokenizer
        turn = episode.turn = sample.turns()[-1]
        episode.sample, episode.turns = sample, episode.turns + 1
        if sample.finish_reason == "length":
            self._end(place, "length")
            return
        said = turn[:-1] if int(turn[-1]) in tokenizer.eos_token_ids else turn
        self._asked[self._means.environments.step(episode.name, tokenizer.decode(said))] = place

    def _hear(self, place: int, future: Future[Outcome]) -> None:
        """The environment has answered."""
        episode = self._open[place]
        try:
            outcome = future.result()
        except EpisodeLost as error:
            _log.warning("%s", error)
            self._lose(place)
            return
        if episode.sample is not None:
            episode.rewards.append((len(episode.sample.response) - 1, outcome.reward))
            if outcome.done or episode.turns == self._means.settings.max_turns:
                self._end(place, "stop" if outcome.done else "length")
                return
        try:
            self._generation.go_on(place, self._tokens(episode, outcome.observation))
        except AlignerError as error:
            _log.info("episode %s ends: %s", episode.name, error)
            if episode.sample is None:
                self._lose(place)
            else:
                self._end(place, "length")

    def _tokens(self, episode: _Episode, observation: Observation) -> list[int]:
        """What the policy is told. Raises AlignerError where messages cannot be appended to what it has said."""
        if isinstance(observation, str):
            return self._means.tokenizer.encode(observation).tolist()
        if episode.sample is None or episode.turn is None:
            if observation:
                raise AlignerError("messages go on from a turn of the policy's; what it is asked first are the data's")
            return []
        chat = self._means.chat
        if episode.conversation is None:
            asked = episode.request.prompt.metadata
            episode.conversation = chat.begin(asked.get("messages", ()), asked.get("tools"))
            if not torch.equal(episode.conversation.tokens, episode.request.prompt.tokens):
                raise AlignerError("messages go on from a prompt of messages; the data has a plain text")
        begun = len(episode.conversation.tokens) + len(episode.turn)
        found = chat.go_on(episode.conversation, episode.turn, observation)
        if isinstance(found, Unsafe):
            raise AlignerError(f"its messages cannot be appended: {found.reason}")
        episode.conversation = found
        return found.tokens[begun:].tolist()

    def _end(self, place: int, reason: FinishReason) -> None:
        episode = self._open.pop(place)
        assert episode.sample is not None
        rewards = torch.zeros(len(episode.sample.response))
        for token, reward in episode.rewards:
            rewards[token] += reward
        self._complete.append((place, replace(episode.sample, finish_reason=reason, rewards=rewards)))
        self._means.environments.finish(episode.name)

    def _lose(self, place: int) -> None:
        """A sample of one token that stands for what could not be drawn."""
        episode = self._open.pop(place)
        prompt = episode.request.prompt
        filler = torch.tensor([self._means.tokenizer.pad_token_id])
        sample = Sample(
            prompt_id=prompt.id,
            sample_index=episode.request.sample_index,
            tokens=torch.cat((prompt.tokens.cpu(), filler)),
            prompt_length=len(prompt.tokens),
            engine_logprobs=torch.zeros(1),
            weight_versions=torch.zeros(1, dtype=torch.int64),
            finish_reason="length",
            metadata=prompt.metadata,
            rewards=torch.full((1,), torch.nan),
        )
        self._complete.append((place, sample))
        self._means.environments.finish(episode.name)
