"""Weights for workers on other GPUs than the ranks': over a link, since no memory is shared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.engines.tensorrt_llm.client import Call, Client
from aligner.errors import AlignerError
from aligner.resharding.link import Link
from aligner.resharding.verify import checksum


def labels(devices: Sequence[str]) -> list[str]:
    """What the link's ranks are called: the sender, then the workers."""
    return ["the driving rank", *(f"TensorRT-LLM's worker on {device}" for device in devices)]


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of each tensor's bits, by name."""
    rows = {name: tensor.reshape(-1, tensor.shape[-1]) for name, tensor in tensors.items()}
    return {name: int(checksum(tensor, tuple(tensor.shape), None, 0)) for name, tensor in rows.items()}


class WeightSender:
    """The driving rank's end of a link to its workers. What fails ends the link; the next `send` makes another one."""

    def __init__(self, client: Client, device: torch.device, timeout_s: float) -> None:
        """Have every worker join. The workers run on this machine: the driver starts a Ray cluster of its own here."""
        self._client, self._devices, self._device, self._timeout_s = client, client.devices(), device, timeout_s
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self._calls = self._generation = 0
        self._link: Link | None = self._join()

    def send(self, tensors: Mapping[str, Tensor], *, verifies: bool = False) -> None:
        """Give whole tensors to every worker, and wait until all have loaded their shares.

        Raises AlignerError when a worker fails, and, with `verifies`, naming tensors that came differently and where.
        """
        if self._link is None:
            self._link = self._join()
        manifest = [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
        try:
            ready = self._next_key()
            with (
                self._client.calling("receive_weights", manifest, ready, verifies) as call,
                self._link.agreement("the weights did not reach every worker"),
            ):
                self._await_workers(call, ready)
                for tensor in tensors.values():
                    self._link.post([(tensor, 1 + worker) for worker in range(len(self._devices))], [])
                    self._link.complete()
            if verifies:
                self._check(checksums(tensors), call.answers)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the link."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _join(self) -> Link:
        generation, ready, timeout = self._generation, self._next_key(), timedelta(seconds=self._timeout_s)
        self._generation += 1
        arguments = ("127.0.0.1", self._store.port, self._devices, self._timeout_s, generation, ready)
        with self._client.calling("join_weight_link", *arguments) as call:
            self._await_workers(call, ready)
            return Link(self._store, 0, labels(self._devices), timeout=timeout, device=self._device, generation=generation)

    def _next_key(self) -> str:
        """Where the workers count themselves, once a call's method runs on them."""
        self._calls += 1
        return f"ready/{self._calls}"

    def _await_workers(self, call: Call, ready: str) -> None:
        """Return when a call's method runs on every worker: a transfer with one that failed before would wait for nothing."""
        end = time.monotonic() + self._timeout_s
        while (count := self._store.add(ready, 0)) < len(self._devices):
            if call.over or time.monotonic() > end:
                raise AlignerError(f"{count} of TensorRT-LLM's {len(self._devices)} workers were ready for weights")
            time.sleep(1e-3)
        self._store.delete_key(ready)

    def _check(self, sent: Mapping[str, int], received: Sequence[Mapping[str, int]]) -> None:
        wrong = [
            f"{name} on {device}"
            for device, got in zip(self._devices, received, strict=True)
            for name, value in sent.items()
            if got[name] != value
        ]
        if wrong:
            raise AlignerError("TensorRT-LLM's workers received other weights than were sent:\n" + "\n".join(wrong))
