"""Weights for workers on other GPUs than the ranks': over a link, since no memory is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.engines.tensorrt_llm.client import Client
from aligner.resharding.link import Link


def labels(devices: Sequence[str]) -> list[str]:
    """What the link's ranks are called: the sender, then the workers."""
    return ["the driving rank", *(f"TensorRT-LLM's worker on {device}" for device in devices)]


class WeightSender:
    """The driving rank's end of a link to its workers."""

    def __init__(self, client: Client, device: torch.device, timeout_s: float) -> None:
        """Have every worker join. The workers run on this machine: the driver starts a Ray cluster of its own here."""
        self._client, devices, timeout = client, client.devices(), timedelta(seconds=timeout_s)
        self._workers = len(devices)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        with client.calling("join_weight_link", "127.0.0.1", self._store.port, devices, timeout_s):
            self._link = Link(self._store, 0, labels(devices), timeout=timeout, device=device)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Give whole tensors to every worker, and wait until all have loaded their shares."""
        manifest = [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
        with self._client.calling("receive_weights", manifest):
            for tensor in tensors.values():
                self._link.post([(tensor, 1 + worker) for worker in range(self._workers)], [])
                self._link.complete()
