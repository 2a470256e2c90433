"""CUDA IPC handles of the TensorRT-LLM engine: they open as the tensors of the sender."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch

from aligner.engines.tensorrt_llm.tensorrt_llm_engine import build_ipc_handles
from aligner.errors import AlignerError


def test_opened_ipc_handles_equal_source_tensors():
    tensors = {
        "rows": torch.arange(6.0).view(2, 3)[1:],
        "transposed": torch.arange(6.0).view(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    }
    (uuid, text), *others = build_ipc_handles(tensors, "GPU-1").items()
    assert (uuid, others) == ("GPU-1", [])
    opened = {
        name: function(*arguments)
        for name, (function, arguments) in pickle.loads(base64.b64decode(text))
    }
    assert list(opened) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(opened[name], tensor) and opened[name].dtype == tensor.dtype
        assert not opened[name].requires_grad


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(AlignerError, match=r"one \(cpu\), other \(meta\)"):
        build_ipc_handles({"one": torch.zeros(1), "other": torch.zeros(1, device="meta")}, "GPU-1")
