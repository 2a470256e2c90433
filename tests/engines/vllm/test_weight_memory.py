"""Memory that transfers weights to vLLM's workers; torch's CUDA IPC calls are mocked."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aligner.engines.external.external_engine import WeightPiece
from aligner.engines.vllm.program import weight_memory
from aligner.engines.vllm.program.weight_memory import (
    DeviceMemory,
    HostMemory,
    Memory,
    SharedSlices,
    TensorSlice,
    compute_checksum,
    copy_tensors,
    open_memory,
    view_tensor,
)
from aligner.engines.vllm.vllm_engine import _build_tensor_slice
from aligner.models.weight_slices import Slice, TensorSpec, compute_engine_slices, weight_table
from aligner.schema import EngineParallelConfig
from tests.engines import engines
from tests.megatron import families

CPU = torch.device("cpu")
TENSORS = {
    "rows": torch.arange(15.0).view(5, 3)[1:],
    "transposed": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
    "number": torch.tensor(3, dtype=torch.int8),
    "trained": torch.ones(7, requires_grad=True),
}
COUNTER = b"/torch_17_4"
SHARED = (5, bytes(range(64)), 80, 512, COUNTER, 3, b"event" * 8, True)
"""Return value of torch's `_share_cuda_` for a storage."""


@pytest.fixture
def gpus(monkeypatch):
    """Mock two visible GPUs; CPU storages are shared as if they were on a GPU."""
    made = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"{'ab'[_ordinal(device)]}0"),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_cuda_", lambda storage: made.append(storage) or SHARED
    )
    return made


def _ordinal(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index or 0


def shared_whole(
    tensors: dict[str, torch.Tensor], memory_of: Callable[[int], Memory] = HostMemory
) -> SharedSlices:
    return SharedSlices(
        [TensorSlice(name, tensor.shape, (), tensor) for name, tensor in tensors.items()],
        memory_of,
    )


def received_handle(shared: SharedSlices) -> dict:
    """Return the handle as the receiver of a JSON message sees it."""
    return json.loads(json.dumps(shared.handle))


def test_opened_memory_stays_readable_after_sender_closes():
    shared = shared_whole(TENSORS)
    handle = received_handle(shared)
    with open_memory(handle["memory"], CPU) as memory:
        assert compute_checksum(memory) == handle["checksum"]
        shared.close()
        found = dict(copy_tensors(memory, handle["pieces"], CPU))
        assert list(found) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert (
                torch.equal(found[name], tensor)
                and found[name].dtype == tensor.dtype
                and not found[name].requires_grad
            )
    with (
        pytest.raises(RuntimeError, match="unable to open file"),
        open_memory(handle["memory"], CPU),
    ):
        pass


def test_slice_is_received_in_whole_tensor_padded_with_nan():
    whole = {
        "fused": torch.randn(4, 6),
        "column": torch.randn(5, 3).bfloat16(),
        "all": torch.randn(2),
    }
    every = slice(0, 4)
    indices = {
        # Two slices of one fused tensor; the second one alternates with another weight.
        "fused": [(every, slice(1, 2)), (every, slice(3, 6, 2))],
        "column": [(slice(3, 5),)],
        "all": [()],
    }
    shared = SharedSlices(
        [
            TensorSlice(name, whole[name].shape, index, whole[name][index])
            for name, ranges in indices.items()
            for index in ranges
        ],
        HostMemory,
    )
    handle = received_handle(shared)
    with open_memory(handle["memory"], CPU) as memory:
        found = dict(copy_tensors(memory, handle["pieces"], CPU))
    shared.close()

    assert list(found) == list(whole)
    for name, tensor in found.items():
        is_received = torch.zeros(tensor.shape, dtype=torch.bool)
        for index in indices[name]:
            is_received[index] = True
        assert torch.equal(tensor[is_received], whole[name][is_received])
        assert tensor[~is_received].isnan().all()


def test_stacked_experts_are_sent_one_by_one(tmp_path):
    directory = families.save("gpt-oss", tmp_path)
    stored = engines.file_tensors(directory)
    table = weight_table(engines.shape_of(directory))
    cuts = compute_engine_slices(table, EngineParallelConfig(tensor=2), rank=1)
    pieces = [
        WeightPiece(spec, cuts[spec.name], read_piece(stored, spec, cuts[spec.name]))
        for spec in table
        if spec.expert == 3 and spec.layer == 1
    ]
    shared = SharedSlices([_build_tensor_slice(piece) for piece in pieces], HostMemory)
    handle = received_handle(shared)
    with open_memory(handle["memory"], CPU) as memory:
        found = dict(copy_tensors(memory, handle["pieces"], CPU))
    shared.close()

    prefix = "model.layers.1.mlp.experts"
    # Rank 1 has the second half of the feed-forward rows, for gate and up the rows from 48 on.
    halves = {
        "gate_up_proj": (slice(None), slice(96, None)),
        "gate_up_proj_bias": (slice(96, None),),
        "down_proj": (slice(48, None),),
        "down_proj_bias": (slice(None),),
    }
    assert found.keys() == {f"{prefix}.3.{name}" for name in halves}
    for name, half in halves.items():
        expert = stored[f"{prefix}.{name}"][3]
        tensor = found[f"{prefix}.3.{name}"]
        assert tensor.shape == expert.shape
        assert torch.equal(tensor[half], expert[half])
        assert tensor.isnan().sum() == expert.numel() - expert[half].numel()


def read_piece(stored: dict[str, torch.Tensor], spec: TensorSpec, cut: Slice) -> torch.Tensor:
    """Return a rank's slice of a weight from the tensors of a file."""
    position = spec.stored_range
    return stored[position.name][position.locate(spec.shape, cut)]


def test_reader_writes_do_not_change_shared_memory():
    shared = shared_whole({"one": torch.ones(8)})
    with open_memory(received_handle(shared)["memory"], CPU) as memory:
        memory.fill_(9)
    with open_memory(received_handle(shared)["memory"], CPU) as memory:
        assert torch.equal(view_tensor(memory, "float32", [8], 0), torch.ones(8))
    shared.close()


def test_checksum_detects_bit_flips_and_swapped_words(monkeypatch):
    monkeypatch.setitem(weight_memory._CHECKSUM_BLOCK_WORDS, "cpu", 8)  # several chunks
    draws = random.Random(0)
    memory = torch.randint(
        0, 256, (80,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    right = compute_checksum(memory)
    for bit in range(8 * len(memory)):
        memory[bit // 8] ^= 1 << bit % 8
        assert compute_checksum(memory) != right
        memory[bit // 8] ^= 1 << bit % 8
    words = memory.view(torch.int32)
    words[3] = words[17].item() ^ -(2**31)  # the two words differ only in the sign
    signs = compute_checksum(memory)
    for one, other in [(3, 17), *(draws.sample(range(20), 2) for _ in range(100))]:
        moved = memory.clone()
        moved.view(torch.int32)[[one, other]] = words[[other, one]]
        assert compute_checksum(moved) != signs
    assert compute_checksum(memory.roll(4)) != signs


@pytest.mark.parametrize("count", [1, 3, 1 << 10])
def test_checksum_does_not_depend_on_chunk_size(monkeypatch, count):
    monkeypatch.setitem(weight_memory._CHECKSUM_BLOCK_WORDS, "cpu", count)
    words = [2**31 - 1, -(2**31), 0, -1, 7, 2**31 - 1]
    memory = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    assert (
        compute_checksum(memory) == sum(place * word for place, word in enumerate(words, 1)) % 2**64
    )


def test_process_on_same_gpu_opens_cuda_memory(gpus, monkeypatch):
    arguments = []
    shared = shared_whole(TENSORS, functools.partial(DeviceMemory, CPU))
    handle = received_handle(shared)
    assert handle["memory"]["kind"] == "cuda" and handle["memory"]["device"] == "GPU-a0"

    def open_storage(*given):
        arguments.append(given)
        return gpus[0]

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    with open_memory(handle["memory"], torch.device("cuda", 0)) as memory:
        assert compute_checksum(memory) == handle["checksum"]
        for name, tensor in copy_tensors(memory, handle["pieces"], CPU):
            assert torch.equal(tensor, TENSORS[name])
    (given,) = arguments
    assert given == (
        0,
        *SHARED[1:6],
        b"",
        False,
    ), "on that GPU as this process counts it, without the sender's event"
    shared.close()


def test_process_on_other_gpu_is_refused(gpus):
    handle = received_handle(shared_whole(TENSORS, functools.partial(DeviceMemory, CPU)))
    message = (
        "the trainer's weights are in the memory of GPU-a0, but this vLLM worker runs on GPU-b0;"
        " both must use the same GPU"
    )
    with (
        pytest.raises(ValueError, match=message),
        open_memory(handle["memory"], torch.device("cuda", 1)),
    ):
        pass


def test_weight_memory_imports_only_torch_and_stdlib():
    tree = ast.parse(Path(inspect.getfile(weight_memory)).read_text())
    named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [
        each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names
    ]
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names == {"torch"}
