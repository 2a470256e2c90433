"""Functions that worker ranks run for the tests of the evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from aligner.data.model_directory import read_shape
from aligner.data.prompts import ExampleStream
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Sample
from aligner.errors import AlignerError
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.megatron.world import World
from aligner.paths import get_run_paths
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.judge import build_judge
from aligner.schema import (
    ActorConfig,
    Config,
    DataConfig,
    EngineParallelConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
)
from aligner.schema.evaluation_suites import Suite
from aligner.schema.reward_sources import parse_evaluation_judge
from aligner.training.engine_setup import build_sampler_and_publisher, build_sampling_options
from aligner.training.evaluator import Evaluations, Evaluator, build_evaluations
from aligner.training.rollout_builder import RolloutBuilder
from aligner.training.services import Services

RESPONSE_TOKENS = 7


def letters(batch: Sequence[ScoringRequest]) -> list[float]:
    """Score each response by its share of letters."""
    return [
        sum(map(str.isalpha, request.response)) / max(len(request.response), 1) for request in batch
    ]


def configuration(model: str, run: str, ranks: int, **evaluation: Any) -> Config:
    """Return a run with greedy evaluation by the share of digits, on `ranks` data ranks."""
    config = Config(
        run=RunConfig(dir=run, steps=5),
        model=ModelConfig(path=model),
        data=DataConfig(prompts=["unused"], max_prompt_tokens=16),
        rollout=RolloutConfig(
            max_response_tokens=RESPONSE_TOKENS, temperature=0.7, stop_at_eos=False
        ),
        actor=ActorConfig(parallel=ParallelConfig(data=ranks)),
        evaluation=EvaluationConfig(**{"every": 2, "function": "digit_fraction"} | evaluation),
    )
    config.engine.parallel = EngineParallelConfig(data=ranks)
    return config


def build_initial_evaluations(config: Config, world: World) -> Evaluations:
    """Build the evaluations of the initial weights. Collective."""
    directory = Path(str(config.model.path))
    shape, tokenizer = read_shape(directory), Tokenizer(directory)
    policy = Policy(
        shape, world, config.actor, directory, config.rollout.temperature, total_updates=1
    )
    sampler, publisher = build_sampler_and_publisher(config, policy, tokenizer, client=None)
    publisher.publish(version=0)
    options, services = build_sampling_options(config.rollout, shape), Services(None, None)
    stream: Any = ExampleStream([[None]], seed=1, shuffle=False)
    builder = RolloutBuilder(stream, sampler, services, config.rollout, options, shape.pad_token_id)
    evaluations = build_evaluations(config, tokenizer, policy, builder, services)
    assert evaluations is not None
    return evaluations


def evaluations(model: str, run: str, ranks: int, **evaluation: Any) -> dict[str, Any]:
    """Evaluate the initial weights greedily, by sampling, and after a resume.

    Returns metrics, responses, and error messages for missing and wrong references, by name.
    """
    config = configuration(model, run, ranks, **evaluation)
    world = worlds.initialize(config.actor.parallel, seed=1, timeout_s=120)
    Path(run).mkdir(exist_ok=True)
    every = build_initial_evaluations(config, world)
    (first,) = every.suites
    found: dict[str, Any] = {"due": [step for step in range(6) if every.is_due(step)]}
    found["lost"] = _error(first, step=2)
    found["step 0"] = first.evaluate(0)
    first._reference_scores = None  # the state after a resume
    found["resumed"] = first.evaluate(2)
    begin(first, world)
    found["beside"] = first.evaluate(2)
    drawing = replace(
        first, suite=_with(first, samples=3), options=replace(first.options, greedy=False)
    )
    found["drawn"] = [drawing.evaluate(2), drawing.evaluate(4)]
    sharp = replace(drawing, options=replace(drawing.options, temperature=0.5))
    found["sharp"] = sharp.evaluate(2)
    found["sharp responses"] = [
        sample.response.tolist()
        for sample in sharp.builder.generate(first.prompts, 3, sharp.options)
    ]
    found["other prompts"] = _error(replace(first, prompts=first.prompts[:1]), step=2)
    found["other scorer"] = _error(replace(first, suite=_with(first, function="math")), step=2)
    samples = first.builder.generate(first.prompts, 1, first.options)
    found["responses"] = [sample.response.tolist() for sample in samples]
    worlds.shutdown()
    return found


def _with(of: Evaluator, **settings: Any) -> Suite:
    return replace(of.suite, settings=replace(of.settings, **settings))


def begin(of: Evaluator, world: World) -> None:
    """Generate responses and begin to score them asynchronously. Collective."""
    drawn = of.generate(of.builder)
    of.begin(2, (lambda: drawn) if world.rank == 0 else None)


def suites(model: str, run: str, ranks: int, **evaluation: Any) -> list[dict[str, float]]:
    """Evaluate the initial weights with every suite.

    Returns the metrics of the first evaluation, after a resume, and of an asynchronous evaluation.
    """
    config = configuration(model, run, ranks, **evaluation)
    world = worlds.initialize(config.actor.parallel, seed=1, timeout_s=120)
    Path(run).mkdir(exist_ok=True)
    every = build_initial_evaluations(config, world)
    found = [every.evaluate(0)]
    for one in every.suites:
        one._reference_scores = None  # the state after a resume
    found.append(every.evaluate(2))
    drawn: Future[list[list[Sample]]] = Future()
    every.begin(4, drawn if world.rank == 0 else None)
    assert every.has_begun
    drawn.set_result(every.generate(every.suites[0].builder))
    found.append(every.evaluate(4))
    assert not every.has_begun
    worlds.shutdown()
    return found


def evaluate_with_judge(
    model: str, run: str, ranks: int, **evaluation: Any
) -> list[dict[str, float]]:
    """Evaluate the initial weights with a judge.

    Returns the metrics of the first evaluation, after a resume in the same directory, and of an
    asynchronous evaluation.
    """
    config = configuration(model, run, ranks, **evaluation)
    world = worlds.initialize(config.actor.parallel, seed=1, timeout_s=120)
    Path(run).mkdir(exist_ok=True)
    (first,), source = (
        build_initial_evaluations(config, world).suites,
        parse_evaluation_judge(config.evaluation),
    )
    assert source is not None
    again = replace(first, judge=first.judge and build_judge(source, get_run_paths(config)))
    found = [first.evaluate(0), again.evaluate(2)]
    begin(again, world)
    found.append(again.evaluate(2))
    worlds.shutdown()
    return found


def _error(of: Evaluator, step: int) -> str | None:
    try:
        of.evaluate(step)
    except AlignerError as error:
        return str(error)
    return None
