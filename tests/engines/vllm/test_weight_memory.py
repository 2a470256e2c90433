"""The memory by which weights reach vLLM's workers; that of a GPU with torch's calls for CUDA IPC pretended."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aligner.engines.vllm.program import weight_memory
from aligner.engines.vllm.program.weight_memory import (
    DeviceMemory,
    HostMemory,
    SharedTensors,
    checksum,
    device_uuid,
    opened,
    tensor_at,
)

CPU = torch.device("cpu")
TENSORS = {
    "rows": torch.arange(15.0).view(5, 3)[1:],
    "transposed": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
    "number": torch.tensor(3, dtype=torch.int8),
    "trained": torch.ones(7, requires_grad=True),
}
COUNTER = b"/torch_17_4"
SHARED = (5, bytes(range(64)), 80, 512, COUNTER, 3, b"event" * 8, True)
"""What torch tells of a storage that it shares."""


@pytest.fixture
def gpus(monkeypatch):
    """Two that this process sees; storages of the processor's are shared as if they were a GPU's."""
    made = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"{'ab'[_ordinal(device)]}0"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: made.append(storage) or SHARED)
    return made


def _ordinal(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index or 0


def sent(shared: SharedTensors) -> dict:
    """Its handle on the other side of a socket."""
    return json.loads(json.dumps(shared.handle))


def test_who_opens_a_handle_has_the_tensors_and_keeps_them_when_it_is_closed():
    shared = SharedTensors(TENSORS, HostMemory)
    handle = sent(shared)
    with opened(handle["memory"], CPU) as memory:
        assert checksum(memory) == handle["checksum"]
        shared.close()
        found = {name: tensor_at(memory, *entry) for name, *entry in handle["tensors"]}
        assert list(found) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype and not found[name].requires_grad
    with pytest.raises(RuntimeError, match="unable to open file"), opened(handle["memory"], CPU):
        pass


def test_what_a_reader_writes_is_its_own():
    shared = SharedTensors({"one": torch.ones(8)}, HostMemory)
    with opened(sent(shared)["memory"], CPU) as memory:
        memory.fill_(9)
    with opened(sent(shared)["memory"], CPU) as memory:
        assert torch.equal(tensor_at(memory, "float32", [8], 0), torch.ones(8))
    shared.close()


def test_a_checksum_changes_with_any_bit_and_any_two_words_that_change_places(monkeypatch):
    monkeypatch.setitem(weight_memory._SUMMED, "cpu", 8)  # so that there are several parts
    draws = random.Random(0)
    memory = torch.randint(0, 256, (80,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    right = checksum(memory)
    for bit in range(8 * len(memory)):
        memory[bit // 8] ^= 1 << bit % 8
        assert checksum(memory) != right
        memory[bit // 8] ^= 1 << bit % 8
    words = memory.view(torch.int32)
    words[3] = words[17].item() ^ -(2**31)  # they differ in the sign alone
    signs = checksum(memory)
    for one, other in [(3, 17), *(draws.sample(range(20), 2) for _ in range(100))]:
        moved = memory.clone()
        moved.view(torch.int32)[[one, other]] = words[[other, one]]
        assert checksum(moved) != signs
    assert checksum(memory.roll(4)) != signs


@pytest.mark.parametrize("count", [1, 3, 1 << 10])
def test_a_checksum_is_the_sum_of_words_times_places_however_many_are_added_at_a_time(monkeypatch, count):
    monkeypatch.setitem(weight_memory._SUMMED, "cpu", count)
    words = [2**31 - 1, -(2**31), 0, -1, 7, 2**31 - 1]
    memory = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    assert checksum(memory) == sum(place * word for place, word in enumerate(words, 1)) % 2**64


def test_every_reader_of_a_gpus_memory_has_a_handle_of_its_own(gpus, monkeypatch):
    arguments = []
    readers = [device_uuid(0), device_uuid(1)]
    shared = SharedTensors(TENSORS, functools.partial(DeviceMemory, CPU, readers))
    handle = sent(shared)
    assert handle["memory"]["kind"] == "cuda" and handle["memory"]["device"] == "GPU-a0"
    assert [*handle["memory"]["handles"]] == ["GPU-a0", "GPU-b0"]
    assert len(gpus) == 2, "each lowers a counter of its own when it lets go"

    def open_storage(*given):
        arguments.append(given)
        return gpus[0]

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    with opened(handle["memory"], torch.device("cuda", 1)) as memory:
        assert checksum(memory) == handle["checksum"]
        for name, *entry in handle["tensors"]:
            assert torch.equal(tensor_at(memory, *entry), TENSORS[name])
    (given,) = arguments
    assert given == (0, *SHARED[1:6], b"", False), "on the sender's GPU as this process counts it, without its event"
    shared.close()


@pytest.mark.parametrize(
    ("readers", "sender", "told"),
    [
        (["GPU-c0"], 0, "weights were shared with workers on GPU-c0, and this one is on GPU-a0"),
        (["GPU-a0"], None, "weights are in the memory of GPU-d0, and this worker sees GPU-a0, GPU-b0 alone"),
    ],
)
def test_gpus_that_do_not_know_each_other_are_refused_by_name(gpus, readers, sender, told):
    handle = sent(SharedTensors(TENSORS, functools.partial(DeviceMemory, CPU, readers)))
    if sender is None:
        handle["memory"]["device"] = "GPU-d0"
    with pytest.raises(ValueError, match=told), opened(handle["memory"], torch.device("cuda", 0)):
        pass


def test_both_environments_can_import_it():
    tree = ast.parse(Path(inspect.getfile(weight_memory)).read_text())
    named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names == {"torch"}
