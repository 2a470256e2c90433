"""Episodes: responses of several turns, and what an environment says between them."""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from aligner.data.chat_turns import ChatTurns, NewBranch
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import FinishReason, Prompt, Sample
from aligner.engines.engine_protocol import (
    BeginsTurns,
    GenerationRequest,
    SamplingOptions,
    TurnGeneration,
)
from aligner.engines.open_episode import OpenEpisode, branch_request, turns_request
from aligner.environments.environment_pool import EnvironmentPool
from aligner.environments.episode_environment import EpisodeLost, Observation, Outcome
from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)

_WAIT_S = 0.1
"""Where all episodes wait for their environments a step ends after so long, for who waits for it to
see life."""
_STEPS_AN_ANSWER = 4


def episode_name(prompt_id: int, sample_index: int, number: int = 1) -> str:
    """What environments know an episode by; `number` tells those of one sample apart, 1 the
    first."""
    return f"{prompt_id}/{sample_index}" if number == 1 else f"{prompt_id}/{sample_index}/{number}"


@dataclass(frozen=True)
class EpisodeEngine:
    """An engine whose responses are episodes in environments of this process's own."""

    engine: BeginsTurns
    environments: EnvironmentPool
    tokenizer: Tokenizer
    settings: EnvironmentConfig
    seed: int
    by_steps: bool = False
    """Whether an answer is heard so many of the engine's steps after it was asked for, and waited
    for then: so that which episodes are complete after how many steps does not hang on how fast
    environments are."""
    told: set[str] = field(default_factory=set)
    """What the log has said once, and need not say again."""

    @cached_property
    def chat(self) -> ChatTurns:
        """How chat messages go on. Raises ConfigError for a model without a chat template."""
        return ChatTurns.for_tokenizer(self.tokenizer)

    def forget(self, first: int) -> None:
        """As `DrawsEpisodes`."""
        self.environments.forget(lambda name: int(name.partition("/")[0]) < first)

    def take_waits(self) -> float | None:
        """As `DrawsEpisodes`."""
        return self.environments.take_waits()

    def close(self) -> None:
        """End the environments."""
        self.environments.close()

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> "EpisodeGeneration":
        """Begin one episode a request, or go on with the one that it has begun; as
        `GenerationEngine.start`."""
        turn_end = self.tokenizer.get_single_token(self.settings.turn_end, "environment.turn_end")
        ends = options.stop_token_ids if turn_end is None else (*options.stop_token_ids, turn_end)
        options = replace(options, stop_token_ids=ends)
        turns = [
            turns_request(each, options, ends, self.settings.max_turn_tokens) for each in requests
        ]
        waits = [each.waits for each in turns]
        return EpisodeGeneration(self, requests, self.engine.start(turns, options), waits, options)


class EpisodeGeneration:
    """A `Generation` of episodes: while environments answer some of them, the engine draws turns of
    the others.

    An episode ends where its environment says so; it is cut where a turn, the response or the
    number of turns reaches its limit. Where messages cannot be appended safely to what the policy
    has said, the whole conversation is worded anew and a new branch goes on from that; where it
    does not fit, the episode is cut. One whose environment fails for good comes with a reward that
    is not a number, which no score is made of.

    One that was begun elsewhere goes on here, with an environment that is asked all that the other
    one was asked, and has to answer what the sample says; else the episode is lost. Meanwhile the
    engine goes on with its last turn.
    """

    def __init__(
        self,
        means: EpisodeEngine,
        requests: Sequence[GenerationRequest],
        generation: TurnGeneration,
        waits: Sequence[bool],
        options: SamplingOptions,
    ) -> None:
        """`generation` has a response for each request, which `waits` or is drawn; turns end with
        `options.stop_token_ids`."""
        self._means, self._generation, self._options = means, generation, options
        self._ends = frozenset(options.stop_token_ids)
        self._open: dict[int, OpenEpisode] = {}
        self._places = {place: place for place in range(len(requests))}
        """Of the engine's responses, branches among them, by their places there."""
        self._asked: dict[Future[Outcome], int] = {}
        self._due: dict[Future[Outcome], int] = {}
        """With `by_steps`: at which of the engine's steps each is heard."""
        self._steps = 0
        self._complete: list[tuple[int, Sample]] = []
        begun = Counter[tuple[int, int]]()
        for place, request in enumerate(requests):
            prompt = request.prompt
            sample = (prompt.id, request.sample_index)
            begun[sample] += 1
            name = episode_name(*sample, begun[sample])
            self._open[place] = OpenEpisode(
                name, request, place, request.begun, is_drawn=not waits[place]
            )
            self._expect(
                place, means.environments.reset(name, *task_of(prompt, means.tokenizer, means.seed))
            )

    @property
    def done(self) -> bool:
        """Whether every episode is complete, and given out."""
        return not (self._open or self._complete)

    def step(self) -> list[tuple[int, Sample]]:
        """Go on with what environments have answered, a step of the engine's; waits for an answer
        where all wait for one."""
        for future in self._heard():
            self._hear(self._asked.pop(future), future)
        if not self._generation.done:
            self._steps += 1
            for at, sample in self._generation.step():
                self._end_turn(at, sample)
        # what is left there is of episodes that are lost
        if not (self._open or self._generation.done):
            self._generation.cancel()
        complete, self._complete = self._complete, []
        return complete

    def unfinished(self) -> list[tuple[int, Sample]]:
        """The episodes that are not complete as they are now, each with its place among the
        requests."""
        drawn = dict(self._generation.unfinished())
        return [
            (place, episode.handed_over(drawn.get(episode.at)))
            for place, episode in self._open.items()
        ]

    def cancel(self) -> None:
        """Drop what is not complete."""
        self._generation.cancel()
        for episode in self._open.values():
            self._means.environments.finish(episode.name)
        self._open.clear()
        self._asked.clear()
        self._due.clear()
        self._complete.clear()

    def _expect(self, place: int, answer: Future[Outcome]) -> None:
        self._asked[answer] = place
        if self._means.by_steps:
            self._due[answer] = self._steps + (
                0 if self._open[place].is_replayed else _STEPS_AN_ANSWER
            )

    def _heard(self) -> list[Future[Outcome]]:
        """The answers that are heard now, in the order of their places."""
        is_idle = self._generation.done and not self._complete
        if not self._means.by_steps:
            if is_idle:
                self._means.environments.wait(self._asked, _WAIT_S, FIRST_COMPLETED)
            heard = {future for future in self._asked if future.done()}
        else:
            if is_idle:
                self._steps = max(self._steps, min(self._due.values(), default=0))
            heard = {future for future, step in self._due.items() if step <= self._steps}
            self._means.environments.wait(heard)
            self._due = {future: step for future, step in self._due.items() if future not in heard}
        return sorted(heard, key=lambda each: self._asked[each])

    def _end_turn(self, at: int, sample: Sample) -> None:
        """The engine has drawn a turn to its end, in that place of its own."""
        place = self._places[at]
        episode = self._open.get(place)
        if episode is None:  # it is lost
            self._generation.leave(at)
            return
        episode.is_drawn = False
        if episode.begun is None:
            self._act(place, sample)
        else:
            episode.drawn = sample

    def _act(self, place: int, sample: Sample) -> None:
        """A turn has ended: have the environment answer it."""
        episode, tokenizer = self._open[place], self._means.tokenizer
        turn = episode.act(sample)
        if sample.finish_reason == "length":
            self._end(place, "length")
            return
        said = turn[:-1] if int(turn[-1]) in tokenizer.eos_token_ids else turn
        # Some models mark tool calls by special tokens.
        action = tokenizer.decode_after(
            sample.tokens[: len(sample.tokens) - len(turn)],
            said,
            skip_special_tokens=not self._means.settings.has_tools,
        )
        self._expect(place, self._means.environments.step(episode.name, action))

    def _hear(self, place: int, future: Future[Outcome]) -> None:
        """The environment has answered."""
        episode = self._open[place]
        try:
            outcome = future.result()
            if episode.turn is not None:
                episode.rewards.append((episode.told - 1, outcome.reward))
            if episode.is_replayed:
                self._hear_again(place, outcome)
            else:
                self._go_on(place, outcome)
        except EpisodeLost as error:
            _log.warning("%s", error)
            self._lose(place)

    def _go_on(self, place: int, outcome: Outcome) -> None:
        episode = self._open[place]
        episode.begun = None
        if self._is_over(episode, outcome):
            self._end(place, "stop" if outcome.done else "length")
            return
        try:
            found = self._told(episode, outcome.observation)
            if isinstance(found, NewBranch):
                self._branch(place, found)
            else:
                self._generation.go_on(episode.at, found)
            episode.hear(found)
            episode.is_drawn = True
        except AlignerError as error:
            _log.info("episode %s ended early: %s", episode.name, error)
            if episode.sample is None:
                self._lose(place)
            else:
                self._end(place, "length")

    def _branch(self, place: int, found: NewBranch) -> None:
        """Have the engine go on from the whole conversation, worded anew.

        Raises AlignerError where that leaves no room, and where the engine cannot.
        """
        episode, told = self._open[place], self._means.told
        request = replace(episode.request, turn_tokens=self._means.settings.max_turn_tokens)
        request = branch_request(
            request, found.conversation.tokens, len(episode.branches) + 1, self._options
        )
        at = self._generation.add(request)
        self._generation.leave(episode.at)
        self._places[at], episode.at = place, at
        if "branch" not in told:
            told.add("branch")
            _log.info(
                "episode %s starts a new branch (logged for the first episode only): %s",
                episode.name,
                found.reason,
            )

    def _hear_again(self, place: int, outcome: Outcome) -> None:
        """The environment has answered what an earlier one did; then it is told the next turn, if
        that is complete.

        Raises EpisodeLost where the sample says something else.
        """
        episode = self._open[place]
        try:
            found = self._told(episode, outcome.observation)
        except AlignerError as error:
            raise EpisodeLost(f"episode {episode.name} cannot be resumed: {error}") from error
        if self._is_over(episode, outcome) or not episode.repeats(found):
            raise EpisodeLost(
                f"episode {episode.name} cannot be resumed: on replay, its environment"
                f" returned a different answer after {episode.turns} turns: {outcome}. The answers"
                " of an environment must depend only on task, seed and actions"
            )
        episode.hear(found)
        turn = episode.next_turn(self._ends)
        if turn is not None:
            self._act(place, turn)
            return
        episode.begun = None
        if episode.drawn is not None:
            self._act(place, episode.drawn)

    def _is_over(self, episode: OpenEpisode, outcome: Outcome) -> bool:
        """Whether no turn follows an answer."""
        return episode.turn is not None and (
            outcome.done or episode.turns == self._means.settings.max_turns
        )

    def _told(self, episode: OpenEpisode, observation: Observation) -> list[int] | NewBranch:
        """What the policy is told, or why messages cannot be appended to what it has said. Raises
        AlignerError."""
        if isinstance(observation, str):
            sample, prompt = episode.sample, episode.request.prompt
            before = prompt.tokens if sample is None else sample.tokens
            return self._means.tokenizer.encode_observation(before, observation).tolist()
        if episode.turn is not None:
            return episode.worded(observation, self._means.chat)
        if observation:
            raise AlignerError(
                f"reset returned {len(observation)} chat messages; the first messages come from the"
                " data, so reset must return a string or an empty list"
            )
        return []

    def _end(self, place: int, reason: FinishReason) -> None:
        episode = self._open.pop(place)
        self._complete.append((place, episode.complete(reason)))
        self._means.environments.finish(episode.name)
        self._generation.leave(episode.at)

    def _lose(self, place: int) -> None:
        """An episode cannot be drawn."""
        episode = self._open.pop(place)
        self._complete.append(
            (place, lost_sample(episode.request, self._means.tokenizer.pad_token_id))
        )
        self._means.environments.finish(episode.name)
        if not episode.is_drawn:
            self._generation.leave(episode.at)


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
