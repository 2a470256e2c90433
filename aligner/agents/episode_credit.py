"""Rewards and metrics that an agent reports for its episode, by requests to `/v1/reward` and
`/v1/metrics`."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field, RootModel

from aligner.agents.protocols.requests import RequestError

_MAX_METRICS = 100
_MAX_NAME_CHARACTERS = 100
# Names that every metrics tracker accepts. A slash separates the parts of a name.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
# Largest float32: samples contain rewards in this type.
_MAX_NUMBER = 3.4028234663852886e38


class RewardBody(BaseModel):
    """A request to `/v1/reward`, which adds a reward to the episode or to one of its turns."""

    reward: float
    completion_id: str | None = None
    """Id of the response whose turn gets the reward; None for the whole episode."""
    choice: int | None = Field(None, ge=0)
    """Index of the choice in that response."""


class MetricsBody(RootModel[dict[str, Annotated[float, Field(strict=True)]]]):
    """A request to `/v1/metrics`, which sets metrics of the episode by their names."""


class EpisodeCredit:
    """Rewards and metrics of one attempt of an agent."""

    def __init__(self) -> None:
        """Create an object without rewards and metrics."""
        self.episode_reward: float | None = None
        """Sum of the rewards for the whole episode; None without any."""
        self.turn_rewards: dict[int, float] = {}
        """Sum of the rewards of a turn, by the index of the turn."""
        self.metrics: dict[str, float] = {}
        """Latest value of each metric, by its name."""
        # indices of the turns of each response, in the order of its choices
        self._turns_of_response: dict[str, Sequence[int]] = {}

    @property
    def has_reward(self) -> bool:
        """Whether the agent has reported a reward, for the episode or for a turn."""
        return self.episode_reward is not None or bool(self.turn_rewards)

    @property
    def total_reward(self) -> float:
        """Sum of all rewards."""
        return (self.episode_reward or 0.0) + sum(self.turn_rewards.values())

    def add_response(self, response_id: str, turns: Sequence[int]) -> None:
        """Record a response, so that the agent can reward its turns.

        Args:
            response_id: Id of the response.
            turns: Index of the turn of each choice; empty if the response is not trained on.
        """
        self._turns_of_response[response_id] = turns

    def add_reward(self, body: RewardBody) -> None:
        """Add a reward to the episode, or to the turn of a response.

        Raises:
            RequestError: The reward is not finite, or the response or its choice does not exist.
        """
        total = self.total_reward + body.reward
        # NaN fails this comparison too
        if not (abs(body.reward) <= _MAX_NUMBER and abs(total) <= _MAX_NUMBER):
            raise RequestError(
                400,
                f"reward: got {body.reward:g}; the reward, and the sum of the episode's rewards,"
                " must be finite",
                param="reward",
            )
        if body.completion_id is None:
            if body.choice is not None:
                raise RequestError(
                    400,
                    f"choice: got {body.choice} without completion_id; set the id of the response",
                    param="choice",
                )
            self.episode_reward = (self.episode_reward or 0.0) + body.reward
            return
        turn = self._find_turn(body.completion_id, body.choice)
        self.turn_rewards[turn] = self.turn_rewards.get(turn, 0.0) + body.reward

    def set_metrics(self, body: MetricsBody) -> None:
        """Set metrics of the episode; a new value of a metric replaces the earlier value.

        Raises:
            RequestError: A name or a value is invalid, or there are too many names. No metric is
                changed then.
        """
        for name, value in body.root.items():
            _check_metric(name, value)
        metrics = self.metrics | body.root
        if len(metrics) > _MAX_METRICS:
            raise RequestError(
                400,
                f"metrics: an episode may have at most {_MAX_METRICS} different names, got"
                f" {len(metrics)}",
            )
        self.metrics = metrics

    def _find_turn(self, response_id: str, choice: int | None) -> int:
        """Return the index of the turn of a response. Raises RequestError."""
        turns = self._turns_of_response.get(response_id)
        if turns is None:
            raise RequestError(
                404,
                f"completion_id: no response of this attempt of the agent has the id"
                f" {response_id!r}; {self._describe_ids()}",
                "completion_not_found",
                "completion_id",
            )
        if not turns:
            raise RequestError(
                400,
                f"completion_id: the response {response_id!r} is no turn of the episode, because it"
                " has no tokens or was requested with X-Aligner-Train: false; to reward the"
                " episode, leave completion_id out",
                param="completion_id",
            )
        if choice is None and len(turns) > 1:
            raise RequestError(
                400,
                f"choice: is required, because the response {response_id!r} has {len(turns)}"
                f" choices; set a number from 0 to {len(turns) - 1}",
                param="choice",
            )
        if (choice or 0) >= len(turns):
            raise RequestError(
                400,
                f"choice: got {choice}, but the response {response_id!r} has {len(turns)} choices;"
                f" set a number from 0 to {len(turns) - 1}",
                param="choice",
            )
        return turns[choice or 0]

    def _describe_ids(self) -> str:
        """Return which ids of responses are valid."""
        ids = [*self._turns_of_response]
        if not ids:
            return "the agent has not received a response yet"
        if len(ids) == 1:
            return f"the only valid id is {ids[0]!r}"
        return f"the {len(ids)} valid ids are those from {ids[0]!r} to {ids[-1]!r}"


def _check_metric(name: str, value: float) -> None:
    """Raise RequestError if the name or the value of a metric is invalid."""
    if len(name) > _MAX_NAME_CHARACTERS or _NAME_PATTERN.fullmatch(name) is None:
        shown_name = name[:_MAX_NAME_CHARACTERS]
        raise RequestError(
            400,
            f"metrics: the name {shown_name!r} must consist of letters, digits, _, ., - and /, with"
            f" a letter, digit or _ at its start and after each /, and of at most"
            f" {_MAX_NAME_CHARACTERS} characters",
        )
    if not abs(value) <= _MAX_NUMBER:
        raise RequestError(400, f"{name}: must be a finite number, got {value:g}", param=name)
