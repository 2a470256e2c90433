"""The generator role: it serves the generation engine.

The engine's ranks receive the weights directly from the trainer's ranks; the server only starts
each transfer.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from aligner.agents.episode_source import build_episodes
from aligner.data.collectives import gather_json, is_distributed
from aligner.data.model_directory import read_shape
from aligner.data.tokenizer import build_run_tokenizer
from aligner.data.types import Prompt, Sample, create_empty_samples
from aligner.engines.build import build_engine
from aligner.engines.engine_loop import EpisodeSource, SampleStarter, SingleResponses
from aligner.engines.engine_protocol import GenerationEngine, SamplingOptions
from aligner.engines.replicas import (
    STEPS_PER_PART,
    EarlyStopCondition,
    GenerationParts,
    create_replica_group,
    generate_in_parts,
    run_to_completion,
)
from aligner.engines.weight_probe import build_run_probe, run_probe
from aligner.file_limits import parse_json
from aligner.megatron.world import join
from aligner.models.model_source import model_directory
from aligner.models.shape import ModelShape
from aligner.resharding.publisher import WeightReceiver, plan_between_worlds
from aligner.schema import Config
from aligner.schema.evaluation_suites import has_any_episodes
from aligner.servers.rank_commands import Handler, rank_handler
from aligner.servers.serving import Caller, compute_model_limits, copy_to_tensor, serve_role
from aligner.servers.triton_host import EndpointFunction
from aligner.servers.wire_protocol import (
    BRANCH_TENSORS,
    GENERATE,
    OPTIONAL_RESPONSE_TENSORS,
    POLICY_PROMPT_TENSORS,
    PROTOCOL_VERSION,
    REPORT_TENSORS,
    RESPONSE_TENSORS,
    EndpointSpec,
    RequestError,
    WeightsError,
    decode_text,
    decode_text_column,
    parse_metadata,
    responses_from_tensors,
    responses_to_tensors,
)

_OPTION_NAMES = {field.name for field in dataclasses.fields(SamplingOptions)}


def serve_generator(config: Config) -> None:
    """Run one rank of the generator until it is stopped."""
    settings = config.engine
    timeout = timedelta(seconds=config.cluster.collective_timeout_s)
    device = join(settings.parallel.ranks, config.cluster.collective_timeout_s)
    rank = dist.get_rank()

    directory = model_directory(config)
    shape = read_shape(directory)
    group = create_replica_group(settings.parallel, rank, timeout)
    engine = build_engine(
        shape,
        settings,
        directory,
        rank=rank,
        seed=config.seed,
        group=group,
        device=device,
        max_sequence_length=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )
    episodes = None
    if has_any_episodes(config):
        tokenizer = build_run_tokenizer(config, directory)
        episodes = build_episodes(config, engine, tokenizer, "generator", rank)

    receiver = build_weight_receiver(config, shape, engine, rank, device)
    generator = GeneratorRank(config, engine, receiver, rank, episodes)
    limits = compute_model_limits(config, directory, shape.vocab_size)
    serve_role(
        "generator",
        config,
        generator.handlers,
        generator.create_endpoints,
        ("version", "connect", "receive"),
        limits,
    )

    # The role has stopped in order: release the environments and the engine.
    if episodes is not None:
        episodes.close()
    engine.shutdown()
    dist.destroy_process_group()


def build_weight_receiver(
    config: Config, shape: ModelShape, engine: GenerationEngine, rank: int, device: torch.device
) -> WeightReceiver:
    """Return the receiver of the trainer's weights on this rank.

    Args:
        config: The run's configuration.
        shape: Dimensions of the policy.
        engine: The engine that gets the weights.
        rank: This rank's index among the engine's ranks.
        device: Device of the received weights.
    """
    # In the ranks of a weight transfer, the engine's ranks follow the trainer's ranks.
    return WeightReceiver(
        plan_between_worlds(shape, config.actor.parallel, engine.weight_format),
        config.actor.parallel.ranks + rank,
        device,
        engine.weight_format,
        config.engine,
        engine.begin_update,
        engine,
    )


class GeneratorRank:
    """One rank's part of the generator, and rank 0's endpoint function."""

    def __init__(
        self,
        config: Config,
        engine: GenerationEngine,
        receiver: WeightReceiver,
        rank: int,
        episodes: EpisodeSource | None = None,
    ) -> None:
        """Store the engine and its surroundings.

        Args:
            config: The run's configuration.
            engine: The generation engine.
            receiver: Receives the trainer's weights for the engine.
            rank: This rank's index among the engine's ranks.
            episodes: The source of episodes; None generates single responses.
        """
        self._settings = config.engine
        self._engine = engine
        self._receiver = receiver
        self._rank = rank
        self._episodes = episodes
        self._source: SampleStarter = episodes or SingleResponses(engine)
        self._can_interrupt = config.engine.in_flight == "interrupt"
        self._probe: Tensor | None = None
        """Token ids of the probe; None with `engine.verify=never`, and for an engine that cannot
        score given tokens: the trainer could not compute the log-probs of generated tokens, because
        its weights have changed since the snapshot."""
        if config.engine.verify != "never" and engine.can_score:
            self._probe = build_run_probe(config, read_shape(model_directory(config)))

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The function that each rank executes for an operation, by the name of the operation."""
        return {
            "generate": self._generate,
            "version": self._version,
            "connect": self._connect,
            "receive": self._receive,
        }

    def create_endpoints(self, caller: Caller) -> Mapping[EndpointSpec, EndpointFunction]:
        """Return rank 0's endpoint functions."""
        return {GENERATE: lambda arrays: _serve_generate(caller, arrays)}

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
        **partial_rollouts: Tensor,
    ) -> GenerationParts | list[Sample]:
        """Generate samples, or continue partial rollouts.

        Args:
            tokens: Prompts, int64 [B, S].
            lengths: Lengths of the prompts, int64 [B].
            prompt_ids: int64 [B].
            samples_per_prompt: Number of samples per prompt.
            options: Fields of SamplingOptions.
            weight_version: Minimum weight version; None accepts any weights.
            enough: Number of complete prompts that suffices; None means all prompts.
            due: Indices of prompts that must be complete.
            metadata: Fields of each prompt's record.
            first_prompt: Recorded environment answers of earlier prompts are deleted.
            **partial_rollouts: Tensors of the partial rollouts; see `responses_to_tensors`.

        Returns:
            The samples. If weights may change during generation, a generator of the samples with a
            pause every few engine steps.

        Raises:
            WeightsError: The engine's weights are older, or it has no weights.
        """
        engine_version = self._find_newest_version()
        if weight_version is not None and (
            engine_version is None or engine_version < weight_version
        ):
            engine_state = (
                "no weights yet" if engine_version is None else f"weight version {engine_version}"
            )
            raise WeightsError(
                f"the generator has {engine_state}, but the request requires version"
                f" {weight_version} or newer"
            )
        if self._episodes is not None and first_prompt is not None:
            self._episodes.drop_journal_before(first_prompt)

        prompts = [
            Prompt(id=prompt_id, text="", tokens=row[:length], metadata=fields)
            for prompt_id, row, length, fields in zip(
                prompt_ids.tolist(),
                tokens,
                lengths.tolist(),
                metadata or [{}] * len(tokens),
                strict=True,
            )
        ]

        samples = create_empty_samples(prompts, samples_per_prompt)
        parts = generate_in_parts(
            self._engine,
            self._source,
            self._settings,
            self._rank,
            responses_from_tensors(samples, partial_rollouts) if partial_rollouts else samples,
            samples_per_prompt,
            SamplingOptions.from_json(options),
            steps=None if enough is None and not self._can_interrupt else STEPS_PER_PART,
            early_stop=None if enough is None else EarlyStopCondition(enough, tuple(due)),
        )
        return parts if self._can_interrupt else run_to_completion(parts)

    def _find_newest_version(self) -> int | None:
        """Return the weight version of the engine; None without weights. Collective.

        Replicas that have exited have no weights until the next weight sync, and generate nothing.
        """
        version = self._engine.version
        if not self._engine.can_restart or not is_distributed():
            return version
        newest = torch.tensor(-1 if version is None else version)
        dist.all_reduce(newest, op=dist.ReduceOp.MAX)
        return None if newest < 0 else int(newest)

    @rank_handler(runs_at_pauses=True)
    def _version(self) -> dict[str, Any]:
        """Return the protocol version and the engine's weight version, -1 without weights."""
        version = self._find_newest_version()
        return {"protocol": PROTOCOL_VERSION, "version": -1 if version is None else version}

    @rank_handler(runs_at_pauses=True)
    def _connect(self, host: str, port: int, generation: int) -> dict[str, Any]:
        """Join the trainer's ranks for weight transfers, through the store at an address."""
        self._receiver.connect(host, port, generation)
        return {"status": "connected"}

    @rank_handler(runs_at_pauses=True)
    def _receive(self, version: int) -> dict[str, Any]:
        """Receive the weights that the trainer's ranks send as a weight version, and compute the
        log-probs of the probe with them (`engine.verify`)."""
        self._receiver.receive(version)
        answer: dict[str, Any] = {"status": "received", "version": version}
        if self._probe is not None:
            start = time.perf_counter()
            results = gather_json(dataclasses.asdict(run_probe(self._engine, self._probe)))
            # All ranks of a replica have the same result.
            answer["probe"] = results[:: self._settings.parallel.replica_ranks]
            answer["probe_seconds"] = time.perf_counter() - start
        return answer


def _serve_generate(caller: Callable[..., Any], arrays: dict[str, NDArray]) -> dict[str, NDArray]:
    """Convert a request of the endpoint `generate`, execute it on the ranks, convert the answer."""
    options = _parse_options(decode_text(arrays["options"]))
    request = {
        "tokens": copy_to_tensor(arrays["tokens"]),
        "lengths": copy_to_tensor(arrays["sequence_lengths"])[:, 0],
        "prompt_ids": copy_to_tensor(arrays["prompt_ids"])[:, 0],
    }
    request |= {
        spec.name: copy_to_tensor(arrays[spec.name])
        for spec in (
            *RESPONSE_TENSORS,
            *OPTIONAL_RESPONSE_TENSORS,
            *BRANCH_TENSORS,
            *POLICY_PROMPT_TENSORS,
            *REPORT_TENSORS,
        )
        if spec.name in arrays
    }
    number_names = ("samples_per_prompt", "weight_version", "enough", "first_prompt")
    numbers = {name: int(arrays[name][0]) for name in number_names if name in arrays}
    metadata = (
        parse_metadata(decode_text_column("metadata", arrays["metadata"]))
        if "metadata" in arrays
        else None
    )
    due = arrays["due"][:, 0].nonzero()[0].tolist() if "due" in arrays else []
    samples = caller("generate", request, options=options, due=due, metadata=metadata, **numbers)

    samples_per_prompt = len(samples) // len(request["tokens"])
    prompts = [
        row[:length]
        for row, length in zip(request["tokens"], request["lengths"].tolist(), strict=True)
    ]
    answer = responses_to_tensors(
        samples, [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    )
    return {name: tensor.numpy() for name, tensor in answer.items()}


def _parse_options(text: str) -> dict[str, Any]:
    """Parse the JSON object of SamplingOptions, and return its fields.

    Raises:
        RequestError: The text is not valid JSON, or has unknown or invalid fields.
        AlignerError: SamplingOptions rejects the values.
    """
    try:
        options = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"options: not valid JSON: {error}") from error
    if not isinstance(options, dict) or (unknown := sorted(set(options) - _OPTION_NAMES)):
        problem = ", ".join(unknown) if isinstance(options, dict) else type(options).__name__
        raise RequestError(
            f"options: got {problem:.200}, allowed: a JSON object with the keys"
            f" {', '.join(sorted(_OPTION_NAMES))}"
        )
    try:
        SamplingOptions.from_json(options)
    except (TypeError, ValueError) as error:
        raise RequestError(f"options: {error}") from error
    return options
