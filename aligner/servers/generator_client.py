"""The client of the generator server: requests for samples, and the start of weight transfers."""

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
from aligner.engines.replicas import EarlyStopCondition
from aligner.placement.addresses import Access, Endpoint
from aligner.servers.remote_client import RemoteClient, RemoteFuture, TransportError
from aligner.servers.wire_protocol import (
    GENERATE,
    encode_text,
    responses_from_tensors,
    responses_to_tensors,
)

# If a rank of a server has exited, the launcher stops the whole server within this time.
_REPLACEMENT_TIMEOUT_S = 10.0


class GeneratorClient(RemoteClient):
    """Client of the generator server, on rank 0 of the trainer."""

    def __init__(
        self,
        endpoint: Endpoint,
        access: Access,
        timeout_s: float,
        update_timeout_s: float,
        has_environment: bool = False,
    ) -> None:
        """Create a client.

        Args:
            endpoint: Address of the generator.
            access: Access key and TLS certificates.
            timeout_s: Deadline of a request for samples in seconds.
            update_timeout_s: Deadline of a weight transfer in seconds.
            has_environment: Whether requests contain the fields of the prompts' records.
        """
        super().__init__("generator", [endpoint], access, timeout_s, max_batch_size=0)
        self._update_timeout_s = update_timeout_s
        self._has_environment = has_environment
        self.first_prompt: int | None = None
        """Index of the first prompt in the stream whose episodes may be started again. Later
        requests contain it, so that the server deletes recorded environment answers of earlier
        prompts."""

    def generate(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: EarlyStopCondition | None = None,
        weight_version: int | None = None,
    ) -> RemoteFuture[list[Sample]]:
        """Request that samples are generated or continued.

        For equal weights, equal requests return equal samples, so that a request can be sent again.

        Args:
            samples: Samples in any state; the samples of a prompt are adjacent. Unfinished samples
                are continued after their last token.
            samples_per_prompt: Number of samples per prompt.
            options: Sampling options.
            enough: When the server may answer before all samples are complete; None waits for all.
            weight_version: Minimum weight version; None accepts any weights.

        Returns:
            The future of the samples. Its error is a RemoteError of kind `WeightsError` if the
            server has older weights or no weights.
        """
        arrays = build_generate_request(
            samples, samples_per_prompt, options, enough, weight_version
        )
        if self._has_environment:
            arrays["metadata"] = encode_metadata(samples[::samples_per_prompt])
        if self.first_prompt is not None:
            arrays["first_prompt"] = np.array([self.first_prompt], dtype=np.int64)

        def request_samples() -> list[Sample]:
            answer = self._infer(GENERATE, arrays)
            return responses_from_tensors(
                samples, {name: torch.tensor(array) for name, array in answer.items()}
            )

        return self._submit(self._request_pool, request_samples)

    def query_instance(self) -> str:
        """Return the name of the server's present start, also while the server generates.

        A restarted generator has another name.

        Raises:
            RemoteError: The server does not answer.
        """
        return str(self.control("health")["instance"])

    def has_restarted(self, instance: str, start_timeout_s: float) -> bool:
        """Return whether the server was restarted since the given start.

        If the server is down or about to exit, the method waits for the restart.

        Args:
            instance: Name of the earlier start.
            start_timeout_s: Maximum startup time of the server in seconds.

        Raises:
            RemoteError: The server does not become ready within `start_timeout_s`.
        """
        deadline = time.monotonic() + _REPLACEMENT_TIMEOUT_S
        while time.monotonic() < deadline and not self._closing.is_set():
            try:
                if self.query_instance() != instance:
                    return True
            except TransportError:
                self.wait_ready(start_timeout_s)
                deadline = time.monotonic() + _REPLACEMENT_TIMEOUT_S
            self._closing.wait(0.2)
        return False

    def connect(self, host: str, port: int, generation: int) -> RemoteFuture[dict[str, object]]:
        """Let the server's ranks join a connection for weight transfers.

        The trainer's ranks must join the connection at the same time.

        Args:
            host: Host of the store through which the ranks find each other.
            port: Port of the store.
            generation: Number of the connection.
        """
        return self._update("connect", host=host, port=port, generation=generation)

    def receive(self, version: int) -> RemoteFuture[dict[str, object]]:
        """Let the server's ranks receive weights, which the trainer's ranks must send
        concurrently."""
        return self._update("receive", version=version)

    def _update(self, op: str, **arguments: object) -> RemoteFuture[dict[str, object]]:
        """Request an operation of a weight transfer."""
        return self._submit(
            self._request_pool,
            lambda: self._replicas[0].control(self._update_timeout_s, op, **arguments),
        )


def build_generate_request(
    samples: Sequence[Sample],
    samples_per_prompt: int,
    options: SamplingOptions,
    enough: EarlyStopCondition | None = None,
    weight_version: int | None = None,
) -> dict[str, NDArray]:
    """Return the input tensors of the endpoint `generate`. See `GeneratorClient.generate`."""
    first_samples = samples[::samples_per_prompt]
    arrays = {
        "tokens": pad_sequence(
            [sample.initial_prompt for sample in first_samples], batch_first=True
        ).numpy(),
        "sequence_lengths": np.array(
            [[len(sample.initial_prompt)] for sample in first_samples], dtype=np.int64
        ),
        "prompt_ids": np.array([[sample.prompt_id] for sample in first_samples], dtype=np.int64),
        "samples_per_prompt": np.array([samples_per_prompt], dtype=np.int64),
        "options": encode_text(json.dumps(dataclasses.asdict(options))),
    }

    if weight_version is not None:
        arrays["weight_version"] = np.array([weight_version], dtype=np.int64)
    # The prompt of the data for each sample; an agent may have written another one.
    prompts = [sample.initial_prompt for sample in samples]
    # Samples without tokens need no further tensors, unless the server may return them unfinished.
    if enough is not None or any(len(sample.response) or sample.branches for sample in samples):
        input_names = {spec.name for spec in GENERATE.inputs}
        arrays |= {
            name: tensor.numpy()
            for name, tensor in responses_to_tensors(samples, prompts).items()
            if name in input_names
        }
    if enough is not None:
        arrays["enough"] = np.array([enough.min_prompts], dtype=np.int64)
        arrays["due"] = np.zeros((len(first_samples), 1), dtype=np.int64)
        arrays["due"][list(enough.required_prompts)] = 1
    return arrays


def encode_metadata(samples: Sequence[Sample]) -> NDArray:
    """Return the fields of each sample's prompt record as a bytes tensor [B, 1] of JSON."""
    return np.array(
        [[json.dumps(dict(sample.metadata)).encode()] for sample in samples], dtype=object
    )
