"""What this package adds to TensorRT-LLM's workers, which import it by name; it can be imported where TensorRT-LLM is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor

from aligner.engines.tensorrt_llm.sender import checksums, labels
from aligner.resharding.link import Link

DEVICE_ARGUMENT = 6
"""Which argument of a handle's function `update_weights` replaces by the worker's own device."""


class AlignerWorker(WorkerExtension):
    """Mixed into a worker, whose `engine` and `device_id` it uses; no name here may be one of the worker's."""

    def forget_prefixes(self) -> None:
        """Keys and values of earlier prompts are not used again."""
        self.engine.reset_prefix_cache()

    def join_weight_link(
        self, host: str, port: int, devices: Sequence[str], timeout_s: float, generation: int, ready: str
    ) -> None:
        """Join the link over which weights come from another GPU: its first rank sends, the others are the workers.

        `devices` are the workers' GPUs, in their order; `ready` is the store's count of those that have come so far.
        """
        rank, timeout = 1 + devices.index(get_device_uuid(self.device_id)), timedelta(seconds=timeout_s)
        if (former := getattr(self, "_weight_link", None)) is not None:
            former.close()
        # The executor's own collectives and the making of a communicator would wait for each other.
        with self.engine.control_action():
            self._weight_store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
            self._weight_store.add(ready, 1)
            self._weight_link = Link(
                self._weight_store, rank, labels(devices), timeout=timeout, device=self._weight_device(), generation=generation
            )

    def receive_weights(
        self, manifest: Sequence[tuple[str, Sequence[int], str]], ready: str, verifies: bool
    ) -> dict[str, int] | None:
        """Take whole tensors, given by name, shape and dtype, from the link's first rank, and load this worker's share.

        With `verifies`: the checksums of what came. A worker that fails ends its link.
        """
        with self._weight_link.agreement("the weights did not arrive"):
            tensors = {
                name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._weight_device())
                for name, shape, dtype in manifest
            }
            self._weight_store.add(ready, 1)
            for tensor in tensors.values():
                self._weight_link.post([], [(tensor, 0)])
                self._weight_link.complete()
        found = checksums(tensors) if verifies else None
        # As if they were handles of another process, so that there is one way into the model.
        entries = [(name, (_given, (tensor, *[None] * DEVICE_ARGUMENT))) for name, tensor in tensors.items()]
        self.update_weights({get_device_uuid(self.device_id): entries})
        return found

    def _weight_device(self) -> torch.device:
        return torch.device("cuda", self.device_id) if torch.cuda.is_available() else torch.device("cpu")


def _given(tensor: Tensor, *_: Any) -> Tensor:
    return tensor
