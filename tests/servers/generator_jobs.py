"""A generator of several ranks, and a trainer of one that gives it weights, for the tests of
weights on their way."""

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
from aligner.data.types import Prompt, Sample, unbegun
from aligner.engines.build import build_engine
from aligner.engines.engine_protocol import SamplingOptions, weight_format
from aligner.engines.replicas import Enough, replica_group
from aligner.errors import AlignerError
from aligner.models.model_source import model_directory
from aligner.resharding.link import Link
from aligner.resharding.publisher import Publisher
from aligner.resharding.remote_publisher import plan_between_worlds
from aligner.schema import Config
from aligner.servers.executor import SpmdExecutor
from aligner.servers.generator_client import request_arrays
from aligner.servers.generator_server import Generator, weight_receiver
from aligner.servers.serving import Caller
from aligner.servers.wire_protocol import GENERATE, with_responses

TIMEOUT = timedelta(seconds=30)


def weights_of(config: Config, version: int) -> dict[str, Tensor]:
    """The initial weights, other ones of the same size at even versions."""
    from safetensors.torch import load_file

    tensors = load_file(model_directory(config) / "model.safetensors")
    return (
        {name: tensor.flip(-1).contiguous() for name, tensor in tensors.items()}
        if version % 2 == 0
        else tensors
    )


class Trainer:
    """The only rank of a trainer."""

    def __init__(self, config: Config, connect: Callable[..., Any]) -> None:
        """`connect` asks the generator to join, and returns a future."""
        self._config = config
        self._tensors: dict[str, Tensor] = {}
        plan = plan_between_worlds(
            read_shape(model_directory(config)),
            config.actor.parallel,
            weight_format(config.engine, "cpu"),
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
            verify_every=config.engine.verify_every,
        )

    def publish(self, version: int) -> None:
        """To a generator that has been asked to receive it."""
        self._tensors = weights_of(self._config, version)
        self._publisher.publish(version)


def run_generator(overrides: Sequence[str], conversation: Callable[..., Any], *args: Any) -> Any:
    """On every rank of the generator; on rank 0 a thread has the conversation, whose outcome is
    returned."""
    config = compose_config(overrides)
    shape, rank = read_shape(model_directory(config)), dist.get_rank()
    group = replica_group(config.engine.parallel, rank, TIMEOUT)
    engine = build_engine(
        shape, config.engine, model_directory(config), rank=rank, seed=config.seed, group=group
    )
    generator = Generator(
        config, engine, weight_receiver(config, shape, engine, rank, torch.device("cpu")), rank
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
    """What a conversation with a generator needs."""

    def __init__(self, config: Config, executor: SpmdExecutor, generator: Generator) -> None:
        self.executor = executor
        self.trainer = Trainer(config, partial(executor.submit, "connect"))
        self._serve = generator.endpoints(Caller("generator", executor, timeout_s=20.0))[GENERATE]

    def update(self, version: int) -> None:
        received = self.executor.submit("receive", version=version)
        self.trainer.publish(version)
        received.result(10)

    def generate(self, prompts: Sequence[Prompt], options: SamplingOptions) -> list[Sample]:
        """One sample a prompt, by way of the endpoint."""
        return self.carry_on(unbegun(prompts, 1), 1, options, None)

    def carry_on(
        self,
        samples: Sequence[Sample],
        each: int,
        options: SamplingOptions,
        *about: Any,
        **more: Any,
    ) -> list[Sample]:
        request = request_arrays(samples, each, options, *about, **more)
        return with_responses(
            samples,
            {name: torch.tensor(array) for name, array in self._serve(dict(request)).items()},
        )


def weights_in_the_middle(
    talk: Generating, prompts: Sequence[Prompt], options: SamplingOptions
) -> tuple[list[Sample], int]:
    """Samples begun by weights 1, with weights 2 there by their first pause; and the version that
    serves afterwards."""
    talk.update(1)
    talk.executor.submit("sleep", seconds=0.2)
    with ThreadPoolExecutor(1) as pool:
        samples = pool.submit(talk.generate, prompts, options)
        time.sleep(0.1)
        talk.update(2)
        return samples.result(10), talk.executor.submit("version").result(10)["version"]


def weights_between_parts(
    talk: Generating, prompts: Sequence[Prompt], each: int, options: SamplingOptions, enough: Enough
) -> list[list[Sample]]:
    """Samples by weights 1 up to `enough`, twice; all of them in the end, by weights 1 and by
    weights 2."""
    talk.update(1)
    first, again = (talk.carry_on(unbegun(prompts, each), each, options, enough) for _ in range(2))
    last = talk.carry_on(first, each, options, Enough(len(prompts)))
    talk.update(2)
    return [first, again, last, talk.carry_on(first, each, options, Enough(len(prompts)))]


def one_replica_refuses(
    talk: Generating, prompts: Sequence[Prompt], options: SamplingOptions
) -> tuple[str, list[Sample]]:
    """What is said of a request of which one replica's share cannot be served, and the samples of
    the next one."""
    talk.update(1)
    long = replace(prompts[-1], tokens=prompts[-1].tokens.repeat(100))
    try:
        talk.generate([*prompts[:-1], long], options)
    except AlignerError as error:
        return str(error), talk.generate(prompts, options)
    raise AssertionError("it was served")
