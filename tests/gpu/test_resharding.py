"""Weight transfer on one CUDA device: over NCCL to the rank itself, and by IPC handle to another
process."""

from __future__ import annotations

import functools
import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from aligner.engines.external.gpu_identity import get_gpu_name
from aligner.engines.tensorrt_llm.tensorrt_llm_engine import build_ipc_handles
from aligner.engines.vllm.program.weight_memory import (
    DeviceMemory,
    SharedSlices,
    TensorSlice,
    compute_checksum,
    copy_tensors,
    open_memory,
)
from aligner.resharding.publisher import Snapshots, on_stream
from aligner.resharding.transport import Link
from tests.engines.tensorrt_llm import contract
from tests.engines.tensorrt_llm.fake import load_handles
from tests.gpu.conftest import needs_cuda

pytestmark = needs_cuda


def test_gpu_link_transfers_and_reduces_tensors():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    device = torch.device("cuda", torch.cuda.current_device())
    link = Link(store, 0, ["trainer rank 0"], timeout=timedelta(seconds=60), device=device)
    sent, received = torch.randn(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    with link.agreement("it failed"):
        for start in (0, 1 << 19):
            half = slice(start, start + (1 << 19))
            link.post([(sent[half], 0)], [(received[half], 0)])
        link.complete()
        link.complete()
        link.all_reduce(sent)
    assert torch.equal(sent, received)
    link.close()


def test_snapshots_keep_their_version_during_training():
    device = torch.device("cuda", torch.cuda.current_device())
    weights = {
        "one": torch.randn(1 << 20, device=device),
        "other": torch.randn(3, 5, device=device),
    }
    expected = {name: tensor.cpu() for name, tensor in weights.items()}
    snapshots = Snapshots(weights.__getitem__, weights, torch.float32, device)
    snapshots.take(0)
    for tensor in weights.values():
        tensor.mul_(2)
    snapshots.select(0, timeout_s=1.0)
    with on_stream(torch.cuda.Stream(device)):
        found = {name: snapshots.read(name) for name in weights}
    for name, tensor in found.items():
        assert torch.equal(tensor.cpu(), expected[name])


def overwrite(pipe: Connection, text: str) -> None:
    """Open tensors by IPC handle as a TensorRT-LLM worker does, and double their values in
    place."""
    for _, (function, arguments) in load_handles(text, contract.VERSIONS[-1]):
        function(*arguments).mul_(2)
    torch.cuda.synchronize()
    pipe.send(None)


def test_ipc_handle_opens_same_memory_in_other_process():
    tensor = torch.arange(8.0, device="cuda")
    torch.cuda.synchronize()
    (text,) = build_ipc_handles({"weight": tensor}, "this").values()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=overwrite, args=(theirs, text), daemon=True)
    process.start()
    try:
        assert ours.poll(120)
        assert torch.equal(tensor.cpu(), 2 * torch.arange(8.0))
    finally:
        process.join(timeout=30)
        process.kill()


def take(pipe: Connection, device: torch.device) -> None:
    """Open buckets as a vLLM worker does, and send back their contents."""
    while (handle := pipe.recv()) is not None:
        pipe.send(read(handle, device))


def read(handle: dict[str, Any], device: torch.device) -> tuple[int, dict[str, list]]:
    with open_memory(handle["memory"], device) as memory:
        found, copies = (
            compute_checksum(memory),
            dict(copy_tensors(memory, handle["pieces"], device)),
        )
    del memory
    return found, {name: copy.tolist() for name, copy in copies.items()}


@pytest.mark.parametrize("gpu", [0, 1])
def test_bucket_reaches_process_that_sees_only_that_gpu(monkeypatch, gpu):
    """The sender's memory is also freed after every bucket."""
    if gpu >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    here = torch.device("cuda", gpu)
    memory_of = functools.partial(DeviceMemory, here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", get_gpu_name(os.environ, gpu))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=take, args=(theirs, torch.device("cuda", 0)), daemon=True)
    process.start()
    try:
        for size in (3, 1 << 18):
            tensors = {
                "matrix": torch.randn(size, 5, device=here).bfloat16(),
                "vector": torch.randn(size, device=here),
            }
            placed = [
                TensorSlice(name, list(tensor.shape), (), tensor)
                for name, tensor in tensors.items()
            ]
            held = torch.cuda.memory_allocated(here)
            shared = SharedSlices(placed, memory_of)
            ours.send(shared.handle)
            assert ours.poll(120)
            found, values = ours.recv()
            assert found == shared.handle["checksum"]
            assert values == {name: tensor.tolist() for name, tensor in tensors.items()}
            shared.close()
            assert torch.cuda.memory_allocated(here) == held
        ours.send(None)
    finally:
        process.join(timeout=30)
        process.kill()
