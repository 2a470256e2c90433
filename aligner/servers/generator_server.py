"""The generator role: the generation engine behind Triton; the trainer's weights reach it shard to
shard."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from aligner.agents.episode_source import build_episodes
from aligner.data.model_directory import read_shape
from aligner.data.tokenizer import run_tokenizer
from aligner.data.types import Prompt, Sample, unbegun
from aligner.engines.build import build_engine
from aligner.engines.engine_loop import SampleSource, SingleResponses, StartsSamples
from aligner.engines.engine_protocol import GenerationEngine, SamplingOptions
from aligner.engines.replicas import (
    STEPS_A_PART,
    Enough,
    SamplesInParts,
    generate_in_parts,
    replica_group,
    run_through,
)
from aligner.megatron.world import join
from aligner.models.model_source import model_directory
from aligner.models.shape import ModelShape
from aligner.resharding.publisher import WeightReceiver, plan_between_worlds
from aligner.schema import Config
from aligner.servers.rank_commands import Handler, rank_handler
from aligner.servers.serving import Caller, model_limits, serve_role, tensor
from aligner.servers.triton_host import Serve
from aligner.servers.wire_protocol import (
    ALSO_DRAWN,
    BRANCHES,
    DRAWN,
    GENERATE,
    PROTOCOL_VERSION,
    EndpointSpec,
    RequestError,
    WeightsError,
    array_text,
    column_texts,
    json_objects,
    response_tensors,
    with_responses,
)

_OPTIONS = {field.name for field in dataclasses.fields(SamplingOptions)}


def serve_generator(config: Config) -> None:
    """One rank of the generator, until it is told to stop."""
    settings, timeout = config.engine, timedelta(seconds=config.cluster.collective_timeout_s)
    device, rank = (
        join(settings.parallel.ranks, config.cluster.collective_timeout_s),
        dist.get_rank(),
    )
    directory = model_directory(config)
    shape, group = read_shape(directory), replica_group(settings.parallel, rank, timeout)
    engine = build_engine(
        shape,
        settings,
        directory,
        rank=rank,
        seed=config.seed,
        group=group,
        device=device,
        context=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )
    episodes = None
    if config.environment.draws_episodes:
        tokenizer = run_tokenizer(config, directory)
        episodes = build_episodes(config, engine, tokenizer, "generator", rank)
    receiver = weight_receiver(config, shape, engine, rank, device)
    generator = Generator(config, engine, receiver, rank, episodes)
    limits = model_limits(config, directory, shape.vocab_size)
    serve_role(
        "generator",
        config,
        generator.handlers,
        generator.endpoints,
        ("version", "connect", "receive"),
        limits,
    )
    if episodes is not None:
        episodes.close()
    engine.shutdown()
    dist.destroy_process_group()


def weight_receiver(
    config: Config, shape: ModelShape, engine: GenerationEngine, rank: int, device: torch.device
) -> WeightReceiver:
    """This rank's end of the way of the trainer's weights to its engine."""
    return WeightReceiver(
        plan_between_worlds(shape, config.actor.parallel, engine.weight_format),
        config.actor.parallel.ranks + rank,
        device,
        engine.weight_format,
        config.engine,
        engine.begin_update,
    )


class Generator:
    """What one rank does, and on rank 0 the endpoint's function."""

    def __init__(
        self,
        config: Config,
        engine: GenerationEngine,
        receiver: WeightReceiver,
        rank: int,
        episodes: SampleSource | None = None,
    ) -> None:
        """`episodes` is the source of episodes; None for single responses."""
        self._layout = config.engine.parallel
        self._engine = engine
        self._receiver = receiver
        self._rank = rank
        self._episodes = episodes
        self._source: StartsSamples = episodes or SingleResponses(engine)
        self._interrupts = config.engine.in_flight == "interrupt"

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What the ranks are asked to do."""
        return {
            "generate": self._generate,
            "version": self._version,
            "connect": self._connect,
            "receive": self._receive,
        }

    def endpoints(self, caller: Caller) -> Mapping[EndpointSpec, Serve]:
        """Rank 0's functions of the endpoints."""
        return {GENERATE: lambda arrays: _answer(caller, arrays)}

    def _generate(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_ids: Tensor,
        samples_per_prompt: int,
        options: Mapping[str, Any],
        weight_version: int | None = None,
        enough: int | None = None,
        due: Sequence[int] = (),
        metadata: Sequence[Mapping[str, Any]] | None = None,
        first_prompt: int | None = None,
        **begun: Tensor,
    ) -> SamplesInParts | list[Sample]:
        served = self._engine.version
        if weight_version is not None and (served is None or served < weight_version):
            found = "no weights yet" if served is None else f"weight version {served}"
            raise WeightsError(
                f"the generator has {found}, but the request requires version {weight_version} or"
                " newer"
            )
        if self._episodes is not None and first_prompt is not None:
            self._episodes.forget(first_prompt)
        prompts = [
            Prompt(id=number, text="", tokens=row[:length], metadata=told)
            for number, row, length, told in zip(
                prompt_ids.tolist(),
                tokens,
                lengths.tolist(),
                metadata or [{}] * len(tokens),
                strict=True,
            )
        ]
        samples = unbegun(prompts, samples_per_prompt)
        parts = generate_in_parts(
            self._source,
            self._layout,
            self._rank,
            with_responses(samples, begun) if begun else samples,
            samples_per_prompt,
            _sampling_options(options),
            steps=None if enough is None and not self._interrupts else STEPS_A_PART,
            enough=None if enough is None else Enough(enough, tuple(due)),
        )
        return parts if self._interrupts else run_through(parts)

    @rank_handler(at_pauses=True)
    def _version(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL_VERSION,
            "version": -1 if self._engine.version is None else self._engine.version,
        }

    @rank_handler(at_pauses=True)
    def _connect(self, host: str, port: int, generation: int) -> dict[str, Any]:
        self._receiver.connect(host, port, generation)
        return {"status": "connected"}

    @rank_handler(at_pauses=True)
    def _receive(self, version: int) -> dict[str, Any]:
        self._receiver.receive(version)
        return {"status": "received", "version": version}


def _answer(caller: Callable[..., Any], arrays: dict[str, NDArray]) -> dict[str, NDArray]:
    options = _parsed_options(array_text(arrays["options"]))
    request = {
        "tokens": tensor(arrays["tokens"]),
        "lengths": tensor(arrays["sequence_lengths"])[:, 0],
        "prompt_ids": tensor(arrays["prompt_ids"])[:, 0],
    }
    request |= {
        spec.name: tensor(arrays[spec.name])
        for spec in (*DRAWN, *ALSO_DRAWN, *BRANCHES)
        if spec.name in arrays
    }
    named = ("samples_per_prompt", "weight_version", "enough", "first_prompt")
    numbers = {name: int(arrays[name][0]) for name in named if name in arrays}
    metadata = (
        json_objects(column_texts("metadata", arrays["metadata"])) if "metadata" in arrays else None
    )
    due = arrays["due"][:, 0].nonzero()[0].tolist() if "due" in arrays else []
    samples = caller("generate", request, options=options, due=due, metadata=metadata, **numbers)
    share = len(samples) // len(request["tokens"])
    prompts = [
        row[:length]
        for row, length in zip(request["tokens"], request["lengths"].tolist(), strict=True)
    ]
    told = response_tensors(samples, [prompt for prompt in prompts for _ in range(share)])
    return {name: drawn.numpy() for name, drawn in told.items()}


def _parsed_options(text: str) -> dict[str, Any]:
    """The keys of SamplingOptions with values that it takes. Raises RequestError, or AlignerError
    as it does."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"options: not valid JSON: {error}") from error
    if not isinstance(options, dict) or (unknown := sorted(set(options) - _OPTIONS)):
        got = ", ".join(unknown) if isinstance(options, dict) else type(options).__name__
        raise RequestError(
            f"options: got {got:.200}, allowed: a JSON object with the keys"
            f" {', '.join(sorted(_OPTIONS))}"
        )
    try:
        _sampling_options(options)
    except (TypeError, ValueError) as error:
        raise RequestError(f"options: {error}") from error
    return options


def _sampling_options(options: Mapping[str, Any]) -> SamplingOptions:
    return SamplingOptions(
        **{**options, "stop_token_ids": tuple(options.get("stop_token_ids", ()))}
    )
