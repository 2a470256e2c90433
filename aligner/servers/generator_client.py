"""The trainer's rank 0 towards the generator: samples, and the moments at which weights move."""

import dataclasses
import json
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from aligner.data.types import Sample
from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.replicas import Enough
from aligner.placement.addresses import Access, Endpoint
from aligner.servers.remote_client import RemoteClient, RemoteFuture, TransportError
from aligner.servers.wire_protocol import GENERATE, response_tensors, text_array, with_responses

_REPLACED_S = 10.0
"""By then a server of which a rank has ended is gone: the launcher ends what is left of it."""


class GeneratorClient(RemoteClient):
    """The generator."""

    def __init__(
        self,
        endpoint: Endpoint,
        access: Access,
        timeout_s: float,
        update_timeout_s: float,
        has_environment: bool = False,
    ) -> None:
        """`timeout_s` is the deadline of a request for samples, `update_timeout_s` that of an
        update of the weights.

        With `has_environment` the generator is told what the data says about prompts.
        """
        super().__init__("generator", [endpoint], access, timeout_s, max_batch_size=0)
        self._update_timeout_s = update_timeout_s
        self._has_environment = has_environment
        self.first_prompt: int | None = None
        """No episode of a prompt before it, in the stream's order, is begun again: told with the
        requests that follow."""

    def generate(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None = None,
        weight_version: int | None = None,
    ) -> RemoteFuture[list[Sample]]:
        """The same samples, each prompt's in a row, taken further by the weights `weight_version`
        or newer ones.

        All are complete in the end, or `enough`; those that are unfinished go on from the tokens
        that they have. Where older weights or none serve the result is a RemoteError whose kind is
        WeightsError. Under the same weights the same request gives the same samples, so that it may
        be sent again.
        """
        arrays = request_arrays(samples, samples_per_prompt, options, enough, weight_version)
        if self._has_environment:
            arrays["metadata"] = metadata_array(samples[::samples_per_prompt])
        if self.first_prompt is not None:
            arrays["first_prompt"] = np.array([self.first_prompt], dtype=np.int64)

        def drawn() -> list[Sample]:
            answer = self._infer(GENERATE, arrays)
            return with_responses(
                samples, {name: torch.tensor(array) for name, array in answer.items()}
            )

        return self._future(self._parallel, drawn)

    def instance(self) -> str:
        """The name of its start that answers, also while it is at work; a generator that is started
        anew has another one.

        Raises RemoteError when none does.
        """
        return str(self.control("health")["instance"])

    def is_another(self, instance: str, start_timeout_s: float) -> bool:
        """Whether the server has been started again since that start of it; waits where it is gone,
        or about to be.

        Raises RemoteError when it does not come back within `start_timeout_s`.
        """
        deadline = time.monotonic() + _REPLACED_S
        while time.monotonic() < deadline and not self._closing.is_set():
            try:
                if self.instance() != instance:
                    return True
            except TransportError:
                self.wait_ready(start_timeout_s)
                deadline = time.monotonic() + _REPLACED_S
            self._closing.wait(0.2)
        return False

    def connect(self, host: str, port: int, generation: int) -> RemoteFuture[dict[str, object]]:
        """Have its ranks join the link whose store is at an address; the trainer's ranks have to
        join it meanwhile."""
        return self._update("connect", host=host, port=port, generation=generation)

    def receive(self, version: int) -> RemoteFuture[dict[str, object]]:
        """Have its ranks take the weights that the trainer's ranks publish meanwhile."""
        return self._update("receive", version=version)

    def _update(self, op: str, **arguments: object) -> RemoteFuture[dict[str, object]]:
        return self._future(
            self._parallel,
            lambda: self._replicas[0].control(self._update_timeout_s, op, **arguments),
        )


def request_arrays(
    samples: Sequence[Sample],
    samples_per_prompt: int,
    options: SamplingOptions,
    enough: Enough | None = None,
    weight_version: int | None = None,
) -> dict[str, NDArray]:
    """A request for samples, as the endpoint takes it."""
    firsts = samples[::samples_per_prompt]
    arrays = {
        "tokens": pad_sequence([sample.asked for sample in firsts], batch_first=True).numpy(),
        "sequence_lengths": np.array([[len(sample.asked)] for sample in firsts], dtype=np.int64),
        "prompt_ids": np.array([[sample.prompt_id] for sample in firsts], dtype=np.int64),
        "samples_per_prompt": np.array([samples_per_prompt], dtype=np.int64),
        "options": text_array(json.dumps(dataclasses.asdict(options))),
    }
    if weight_version is not None:
        arrays["weight_version"] = np.array([weight_version], dtype=np.int64)
    if enough is not None or any(len(sample.response) or sample.branches for sample in samples):
        taken = {spec.name for spec in GENERATE.inputs}
        arrays |= {
            name: drawn.numpy()
            for name, drawn in response_tensors(samples).items()
            if name in taken
        }
    if enough is not None:
        arrays["enough"] = np.array([enough.prompts], dtype=np.int64)
        arrays["due"] = np.zeros((len(firsts), 1), dtype=np.int64)
        arrays["due"][list(enough.due)] = 1
    return arrays


def metadata_array(samples: Sequence[Sample]) -> NDArray:
    """What the data says about each one's prompt, as the endpoint takes it."""
    return np.array(
        [[json.dumps(dict(sample.metadata)).encode()] for sample in samples], dtype=object
    )
