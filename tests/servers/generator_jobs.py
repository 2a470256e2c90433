"""A generator with several ranks and a trainer with one rank, for the tests of weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from aligner.config.compose import compose_config
from aligner.data.model_directory import read_shape
from aligner.data.types import Prompt, Sample, create_empty_samples
from aligner.engines.build import build_engine
from aligner.engines.engine_protocol import SamplingOptions, compute_weight_format
from aligner.engines.replicas import EarlyStopCondition, create_replica_group
from aligner.engines.weight_probe import (
    ProbeResult,
    ProbeTolerance,
    build_run_probe,
    find_probe_problem,
)
from aligner.errors import AlignerError
from aligner.models.model_source import model_directory
from aligner.resharding.publisher import (
    GeneratorCalls,
    Publisher,
    RemotePublisher,
    plan_between_worlds,
)
from aligner.resharding.transport import Link
from aligner.resharding.weight_update import PublishStats
from aligner.schema import Config
from aligner.servers.executor import SpmdExecutor
from aligner.servers.generator_client import build_generate_request
from aligner.servers.generator_server import GeneratorRank, build_weight_receiver
from aligner.servers.serving import Caller
from aligner.servers.wire_protocol import GENERATE, responses_from_tensors

TIMEOUT = timedelta(seconds=30)


def weights_of(config: Config, version: int) -> dict[str, Tensor]:
    """Return the initial weights for odd versions, and different weights for even versions."""
    from safetensors.torch import load_file

    tensors = load_file(model_directory(config) / "model.safetensors")
    return (
        {name: tensor.flip(-1).contiguous() for name, tensor in tensors.items()}
        if version % 2 == 0
        else tensors
    )


class Trainer:
    """A trainer with one rank, which publishes weights."""

    def __init__(self, config: Config, connect: Callable[..., Any]) -> None:
        """Connect to a generator; `connect` makes the generator join, and returns a future."""
        self._config = config
        self._tensors: dict[str, Tensor] = {}
        shape = read_shape(model_directory(config))
        plan = plan_between_worlds(
            shape,
            config.actor.parallel,
            compute_weight_format(config.engine, "cpu", shape.family),
        )
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT
        )
        joined = connect(host="127.0.0.1", port=self._store.port, generation=0)
        link = Link(self._store, 0, plan.labels, timeout=TIMEOUT)
        joined.result(30)
        self._publisher = Publisher(
            plan,
            link,
            read=lambda name: self._tensors[name],
            begin_update=None,
            bucket_bytes=config.engine.bucket_mib << 20,
            held_weights=None,
            verify=config.engine.verify,
        )

    def publish(self, version: int) -> None:
        """Publish a version to a generator that waits for it."""
        self._tensors = weights_of(self._config, version)
        self._publisher.publish(version)


def run_generator(overrides: Sequence[str], conversation: Callable[..., Any], *args: Any) -> Any:
    """Run the generator on every rank; on rank 0, a thread runs the conversation.

    Returns the conversation's result on rank 0.
    """
    config = compose_config(overrides)
    shape, rank = read_shape(model_directory(config)), dist.get_rank()
    group = create_replica_group(config.engine.parallel, rank, TIMEOUT)
    engine = build_engine(
        shape, config.engine, model_directory(config), rank=rank, seed=config.seed, group=group
    )
    generator = GeneratorRank(
        config,
        engine,
        build_weight_receiver(config, shape, engine, rank, torch.device("cpu")),
        rank,
    )
    handlers = {**generator.handlers, "sleep": lambda seconds: time.sleep(seconds)}
    executor = SpmdExecutor(handlers, drain_s=5.0, heartbeat_s=5.0, collective_timeout_s=30.0)
    if rank:
        return executor.run()
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(lambda: conversation(Generating(config, executor, generator), *args))
        outcome.add_done_callback(lambda _: executor.shutdown())
        executor.run()
        return outcome.result(10)


class Generating:
    """The generator's endpoint and a trainer that publishes weights to it."""

    def __init__(self, config: Config, executor: SpmdExecutor, generator: GeneratorRank) -> None:
        self.executor = executor
        self.trainer = Trainer(config, partial(executor.submit, "connect"))
        self._serve = generator.create_endpoints(Caller("generator", executor, timeout_s=20.0))[
            GENERATE
        ]

    def update(self, version: int) -> None:
        received = self.executor.submit("receive", version=version)
        self.trainer.publish(version)
        received.result(10)

    def generate(self, prompts: Sequence[Prompt], options: SamplingOptions) -> list[Sample]:
        """Generate one sample per prompt through the endpoint."""
        return self.continue_samples(create_empty_samples(prompts, 1), 1, options, None)

    def continue_samples(
        self,
        samples: Sequence[Sample],
        each: int,
        options: SamplingOptions,
        *about: Any,
        **more: Any,
    ) -> list[Sample]:
        request = build_generate_request(samples, each, options, *about, **more)
        return responses_from_tensors(
            samples,
            {name: torch.tensor(array) for name, array in self._serve(dict(request)).items()},
        )


def sync_during_generation(
    generating: Generating, prompts: Sequence[Prompt], options: SamplingOptions
) -> tuple[list[Sample], int]:
    """Generate with weights 1, and sync weights 2 before the first pause.

    Returns the samples, and the version that serves afterwards.
    """
    generating.update(1)
    generating.executor.submit("sleep", seconds=0.2)
    with ThreadPoolExecutor(1) as pool:
        samples = pool.submit(generating.generate, prompts, options)
        time.sleep(0.1)
        generating.update(2)
        return samples.result(10), generating.executor.submit("version").result(10)["version"]


class ReferenceProbe:
    """The probe of weights that transformers runs; see `WeightProbe`."""

    def __init__(self, config: Config, wrong_version: int | None = None) -> None:
        """With `wrong_version`, the log-probs of this version are those of other weights."""
        from transformers import AutoModelForCausalLM

        self._config = config
        self._model = AutoModelForCausalLM.from_pretrained(model_directory(config))
        self._sequences = build_run_probe(config, read_shape(model_directory(config)))
        self._wrong_version = wrong_version
        self.version = 0

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Return the log-probs of `version`."""
        weights = weights_of(self._config, self.version + (self.version == self._wrong_version))
        self._model.load_state_dict(weights, strict=False)
        logits = self._model(self._sequences).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, self._sequences[:, 1:, None])[..., 0]

    def check(self, version: int, trainer_logprobs: Tensor, results: Sequence[Any]) -> float:
        """Compare the results of all replicas."""
        for values in results:
            result = ProbeResult(**values)
            problem = find_probe_problem(result, trainer_logprobs, ProbeTolerance(1e-4, False))
            if problem is not None:
                raise AlignerError(problem)
        return float(len(results))


def sync_with_probe(
    generating: Generating, config: Config, wrong_version: int
) -> tuple[list[PublishStats], str]:
    """Publish versions as an asynchronous trainer does, until the probe of `wrong_version` fails.

    Returns the statistics of the versions before, and the error.
    """
    submit = generating.executor.submit
    calls = GeneratorCalls(
        lambda: "generator",
        lambda instance: False,
        lambda host, port, generation: submit(
            "connect", host=host, port=port, generation=generation
        ),
        lambda version: submit("receive", version=version),
    )
    shape = read_shape(model_directory(config))
    weight_format = compute_weight_format(config.engine, "cpu", shape.family)
    probe = ReferenceProbe(config, wrong_version)
    publisher = RemotePublisher(
        plan_between_worlds(shape, config.actor.parallel, weight_format),
        0,
        torch.device("cpu"),
        weight_format,
        config.engine,
        host="127.0.0.1",
        read=lambda name: weights_of(config, probe.version)[name],
        run_on_rank0_and_share=lambda action: action(),
        calls=calls,
        probe=probe,
    )
    found = []
    for version in range(1, wrong_version + 1):
        probe.version = version
        try:
            publisher.publish(version)
        except AlignerError as error:
            return found, str(error)
        assert publisher.stats is not None
        found.append(publisher.stats)
    raise AssertionError("the probe did not fail")


def sync_between_requests(
    generating: Generating,
    prompts: Sequence[Prompt],
    each: int,
    options: SamplingOptions,
    enough: EarlyStopCondition,
) -> list[list[Sample]]:
    """Generate with weights 1 until `enough`, twice; finish the first result with weights 1, and
    also with weights 2."""
    generating.update(1)
    first, again = (
        generating.continue_samples(create_empty_samples(prompts, each), each, options, enough)
        for _ in range(2)
    )
    last = generating.continue_samples(first, each, options, EarlyStopCondition(len(prompts)))
    generating.update(2)
    return [
        first,
        again,
        last,
        generating.continue_samples(first, each, options, EarlyStopCondition(len(prompts))),
    ]


def request_one_replica_refuses(
    generating: Generating, prompts: Sequence[Prompt], options: SamplingOptions
) -> tuple[str, list[Sample]]:
    """Send a request that one replica must refuse, then a valid request.

    Returns the error of the first request, and the samples of the second one.
    """
    generating.update(1)
    long = replace(prompts[-1], tokens=prompts[-1].tokens.repeat(100))
    try:
        generating.generate([*prompts[:-1], long], options)
    except AlignerError as error:
        return str(error), generating.generate(prompts, options)
    raise AssertionError("it was served")
