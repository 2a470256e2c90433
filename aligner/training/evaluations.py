"""All that a run is evaluated on: a suite behind the other."""

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Sample
from aligner.environments.tool_protocol import ListedTool
from aligner.megatron.policy import Policy
from aligner.rollout.rollout_builder import RolloutBuilder
from aligner.rollout.services import Services
from aligner.schema import Config
from aligner.schema.evaluation_suites import evaluation_suites
from aligner.training.evaluator import Evaluator, build_evaluator


@dataclass(frozen=True)
class Evaluations:
    """One rank's part of evaluating the policy on every suite; every rank calls every method."""

    suites: tuple[Evaluator, ...]
    every: int
    last_step: int

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called, and `evaluate` is to follow."""
        return any(one.has_begun for one in self.suites)

    def is_due(self, step: int) -> bool:
        """Whether the weights of `step` are to be evaluated: the initial ones, every so many
        steps', and the last."""
        return step % self.every == 0 or step == self.last_step

    def draw(self, builder: RolloutBuilder) -> list[list[Sample]]:
        """Responses to each suite's prompts, as `Evaluator.draw`."""
        return [one.draw(builder) for one in self.suites]

    def begin(self, step: int, drawn: Future[list[list[Sample]]] | None) -> None:
        """Have each suite of what is `drawn` of the weights of `step` scored, as `Evaluator.begin`.
        Collective."""
        for place, one in enumerate(self.suites):
            one.begin(step, None if drawn is None else functools.partial(_drawn_of, drawn, place))

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics of the weights of `step`, as `Evaluator.evaluate`. Collective."""
        return {name: value for one in self.suites for name, value in one.evaluate(step).items()}


def _drawn_of(drawn: Future[list[list[Sample]]], place: int) -> list[Sample]:
    return drawn.result()[place]


def build_evaluations(
    config: Config,
    tokenizer: Tokenizer,
    policy: Policy,
    builder: RolloutBuilder,
    services: Services,
    tools: Sequence[ListedTool] = (),
) -> Evaluations | None:
    """What evaluates the run; None where `evaluation.every` is 0. Raises ConfigError as
    `build_evaluator`."""
    if not config.evaluation.every:
        return None
    each = (
        build_evaluator(config, suite, tokenizer, policy, builder, services, tools)
        for suite in evaluation_suites(config)
    )
    return Evaluations(tuple(each), config.evaluation.every, config.run.steps)
