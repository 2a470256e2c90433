"""CUDA IPC handles of the TensorRT-LLM engine: workers allow them, and they open as the tensors of
the sender."""

from __future__ import annotations

import pytest
import torch

from aligner.engines.tensorrt_llm.tensorrt_llm_engine import build_ipc_handles
from aligner.errors import AlignerError
from tests.engines.tensorrt_llm import contract
from tests.engines.tensorrt_llm.fake import installed, load_handles, open_tensor


@pytest.mark.parametrize("release", contract.VERSIONS)
def test_opened_ipc_handles_equal_source_tensors(release):
    tensors = {
        "rows": torch.arange(6.0).view(2, 3)[1:],
        "transposed": torch.arange(6.0).view(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    }
    with installed(release):
        (uuid, text), *others = build_ipc_handles(tensors, "GPU-1").items()
    assert (uuid, others) == ("GPU-1", [])
    opened = {
        name: open_tensor(function, arguments, 1)
        for name, (function, arguments) in load_handles(text, release)
    }
    assert list(opened) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(opened[name], tensor) and opened[name].dtype == tensor.dtype
        assert not opened[name].requires_grad


@pytest.mark.parametrize("release", ["1.3", "1.4"])
def test_worker_refuses_handles_of_cpu_tensors(release):
    (text,) = build_ipc_handles({"one": torch.zeros(1)}, "GPU-1").values()
    with pytest.raises(
        ValueError, match=r"Import torch.storage \| _load_from_bytes is not allowed"
    ):
        load_handles(text, release)


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(AlignerError, match=r"one \(cpu\), other \(meta\)"):
        build_ipc_handles({"one": torch.zeros(1), "other": torch.zeros(1, device="meta")}, "GPU-1")
