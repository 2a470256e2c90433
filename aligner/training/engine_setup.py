"""Build the sampler of a trainer rank, and the publisher that sends the policy's weights to the
engine."""

import functools
import os
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import ProcessGroup

from aligner.agents.episode_source import build_episodes
from aligner.agents.tool_protocol import ListedTool
from aligner.data.tokenizer import Tokenizer
from aligner.engines.build import build_engine
from aligner.engines.engine_protocol import (
    GenerationEngine,
    SamplingOptions,
    SpanListener,
    compute_weight_format,
)
from aligner.engines.replicas import create_replica_group
from aligner.megatron.policy import Policy
from aligner.models.model_source import model_directory
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import compute_engine_slices
from aligner.placement.roles import has_generator
from aligner.resharding.publisher import (
    GeneratorCalls,
    Publisher,
    RemotePublisher,
    plan_between_worlds,
)
from aligner.resharding.transfer_plan import plan_to_engine
from aligner.resharding.transport import Link
from aligner.resharding.weight_update import WeightFormat, WeightPublisher, WeightUpdate
from aligner.schema import Config, RolloutConfig
from aligner.schema.evaluation_suites import has_any_episodes
from aligner.servers.generator_client import GeneratorClient
from aligner.training.samplers import ColocatedSampler, RemoteSampler, Sampler
from aligner.training.services import run_and_broadcast_result
from aligner.training.weight_verification import PolicyProbe, VerifyingPublisher


def build_sampler_and_publisher(
    config: Config,
    policy: Policy,
    tokenizer: Tokenizer,
    client: GeneratorClient | None,
    listener: SpanListener | None = None,
    tools: Sequence[ListedTool] = (),
) -> tuple[Sampler, WeightPublisher]:
    """Return the sampler of this rank, and the publisher of its weights. Collective.

    Args:
        config: Configuration of the run.
        policy: This rank's part of the policy.
        tokenizer: Tokenizer of the model, for episodes.
        client: Client of the generator on rank 0; None on the other ranks, and if the engine is
            colocated.
        listener: Called with the begin and end of the activities of a colocated engine and its
            episodes, and of each weight transfer to a generator.
        tools: Tools of the environment.
    """
    if has_generator(config):
        publisher = _build_remote_publisher(config, policy, client, listener)
        return RemoteSampler(client, publisher), publisher

    rank = policy.world.rank
    timeout = timedelta(seconds=config.cluster.collective_timeout_s)
    group = create_replica_group(config.engine.parallel, rank, timeout)
    # The engine sizes its KV cache by the free memory, before the optimizer state is allocated.
    with policy.runner.reserve_optimizer_memory():
        engine = _build_colocated_engine(config, policy, group, listener)

    episodes = None
    if has_any_episodes(config):
        episodes = build_episodes(config, engine, tokenizer, "trainer", rank, listener, tools)
    sampler = ColocatedSampler(engine, config.engine, rank, episodes)
    return sampler, _build_colocated_publisher(config, policy, engine, listener)


def _build_remote_publisher(
    config: Config, policy: Policy, client: GeneratorClient | None, listener: SpanListener | None
) -> RemotePublisher:
    """Return the publisher that sends weights to the generator."""
    # Only rank 0 has a client; the other ranks only send their slices of the weights.
    calls = None
    if client is not None:
        has_restarted = functools.partial(
            client.has_restarted, start_timeout_s=config.server.start_timeout_s
        )
        calls = GeneratorCalls(client.query_instance, has_restarted, client.connect, client.receive)

    def add_span(name: str, start: float, end: float) -> None:
        # In a synchronous run, the trainer records the weight transfer as a phase of its own.
        is_recorded = name != "publish" or config.rollout.max_staleness > 0
        if listener is not None and is_recorded:
            listener(name, start, end)

    world = policy.world
    # The generator computes the same format from the same configuration, so that both sides derive
    # the same transfer plan without exchanging it.
    generator_format = compute_weight_format(
        config.engine, world.device, policy.runner.shape.family
    )
    plan = plan_between_worlds(policy.runner.shape, config.actor.parallel, generator_format)
    return RemotePublisher(
        plan,
        world.rank,
        world.device,
        generator_format,
        config.engine,
        host=os.environ["MASTER_ADDR"],
        read=policy.runner.weights.read,
        run_on_rank0_and_share=run_and_broadcast_result,
        calls=calls,
        listener=add_span,
        probe=_build_probe(config, policy, generator_format),
    )


def _build_probe(config: Config, policy: Policy, engine_format: WeightFormat) -> PolicyProbe | None:
    """Return the probe that verifies weight syncs; None with `engine.verify=never`."""
    if config.engine.verify == "never":
        return None
    return PolicyProbe(config, policy, engine_format)


def _build_colocated_publisher(
    config: Config, policy: Policy, engine: GenerationEngine, listener: SpanListener | None
) -> VerifyingPublisher:
    """Return the publisher that sends weights to the engine on the trainer's ranks."""
    weights = policy.runner.weights
    world = policy.world
    engine_format = engine.weight_format

    def begin_update(version: int) -> WeightUpdate:
        # The engine may use the trainer's parameters as its own, so they must be final.
        weights.finish_update()
        engine.wake()
        return engine.begin_update(version)

    plan = plan_to_engine(policy.runner.shape, world.layout, engine_format)
    link = Link.from_default_group(
        plan.labels, timeout=timedelta(seconds=config.engine.update_timeout_s), device=world.device
    )
    publisher = Publisher.for_engine(
        plan,
        link,
        config.engine,
        engine_format,
        read=weights.read,
        begin_update=begin_update,
        held_weights=engine,
        copied_names=weights.copied_names,
        listener=listener,
    )
    probe = _build_probe(config, policy, engine_format)
    return VerifyingPublisher(publisher, engine, probe, config, listener)


def _build_colocated_engine(
    config: Config, policy: Policy, group: ProcessGroup | None, listener: SpanListener | None
) -> GenerationEngine:
    """Return this rank's part of a colocated engine; `group` holds the ranks of its replica."""
    layout = config.engine.parallel
    weights = policy.runner.weights
    world = policy.world
    shared_parameters = None
    if config.engine.update == "shared":
        # Where both layouts have the same slices, the engine uses the trainer's parameters instead
        # of a copy.
        shared_parameters = weights.parameters_with_slices(
            compute_engine_slices(weights.table, layout, world.rank)
        )
    return build_engine(
        policy.runner.shape,
        config.engine,
        model_directory(config),
        rank=world.rank,
        seed=config.seed,
        group=group,
        device=world.device,
        shared_parameters=shared_parameters,
        max_sequence_length=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        listener=listener,
    )


def build_sampling_options(settings: RolloutConfig, shape: ModelShape) -> SamplingOptions:
    """Return the sampling parameters of a run's rollouts."""
    return SamplingOptions(
        max_new_tokens=settings.max_response_tokens,
        min_new_tokens=settings.min_response_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        renormalize=settings.renormalize,
        stop_token_ids=shape.eos_token_ids if settings.stop_at_eos else (),
        stop=tuple(settings.stop),
    )
